"""Tests of evaluate.py: pictures, samples and scores, on tiny models with random weights."""

import dataclasses
import json
import math

import pytest
import torch

import evaluate as ev
import treegrpo as T

torch.set_num_threads(1)
torch.manual_seed(0)


@pytest.fixture(autouse=True)
def random_base(tmp_path, monkeypatch):
    """A cheap base: tiny models keep their random initial weights."""
    monkeypatch.setattr(T, "BASE", T.BASE | {"width": 32, "blocks": 1})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    monkeypatch.setattr(T, "pretrain", lambda kind, net: None)
    monkeypatch.chdir(tmp_path)


def trained(*flags, name="run", shift=0.02):
    """A run folder as training leaves it, with weights moved at random."""
    cfg = T.parse([*flags, "--out", name, "--eval-images", "8", "--iterations", "3"])
    run = T.Run(cfg)
    cfg.folder.mkdir(parents=True)
    (cfg.folder / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    log = [{"iteration": 0} | run.measure()]
    for p in run.policy.trainable:
        p.data += shift * torch.randn_like(p)
    run.iteration = 3
    log.append({"iteration": 3, "reward": 0.3} | run.measure())
    (cfg.folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    run.policy.export(cfg.folder / "best")
    run.save()
    return run


def evaluate(*argv):
    return ev.main([str(a) for a in argv])


# ---- pictures -----------------------------------------------------------------------
@pytest.mark.parametrize("flags", [
    (), ("--branch", "3", "1", "2"), ("--method", "flow-grpo"), ("--method", "tempflow-grpo"),
    ("--branch", "3", "--depth", "5", "--window-mode", "fixed", "--window-start", "3"),
    ("--model", "tiny-ddpm", "--branch", "2"),
])
def test_pictures(flags):
    from PIL import Image

    run = trained(*flags)
    ev.draw_run(run)
    for name in ("curve", "grid", "tree"):
        width, height = Image.open(run.cfg.folder / f"{name}.png").size
        assert 500 < width < 6000 and 250 < height < 4000, (name, width, height)


def test_no_matplotlib_is_no_error(monkeypatch, capsys):
    run = trained()
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    ev.draw_run(run)
    assert "matplotlib" in capsys.readouterr().out and not (run.cfg.folder / "tree.png").exists()


def level(*parent):
    return T.Level(*[None] * 4, torch.tensor(parent), *[None] * 3)


def test_tree_places_by_hand():
    """Root 0 has edges 0, 2; root 1 edge 1. Below: edge 0 and 3 from node 0, 1 from 1, 2 from 2."""
    tree = T.Tree([level(0, 1, 0), level(0, 1, 2, 0)], torch.zeros(4, 1), None,
                  torch.tensor([0, 1, 0, 0]))
    top, middle, leaves = ev.tree_rows(tree)
    assert leaves == {0: 1.0, 3: 2.0, 2: 3.5, 1: 5.0}  # left to right, a gap between families
    assert middle == {0: 1.5, 2: 3.5, 1: 5.0} and top == {0: 2.5, 1: 5.0}


def test_large_trees_are_cut():
    chains = T.Tree([level(*range(24))] * 3, torch.zeros(24, 1), None, torch.arange(24))
    assert [len(row) for row in ev.tree_rows(chains)] == [12] * 4
    wide = T.Tree([level(*[n // 100 for n in range(200)])], torch.zeros(200, 1), None,
                  torch.zeros(200))
    assert [len(row) for row in ev.tree_rows(wide)] == [1, 81]


# ---- runs and samples ---------------------------------------------------------------
def test_weights():
    run = trained()
    same = {w: torch.equal(ev.load_run("run", w).policy.trainable[0], run.policy.trainable[0])
            for w in ("best", "last", "base")}
    assert same == {"best": True, "last": True, "base": False}


def test_averaged_weights():
    run = trained("--ema", "0.5")
    run.ema = [p + 1 for p in run.policy.trainable]
    run.save()
    last, best = ev.load_run("run", "last"), ev.load_run("run", "best")
    with last.averaged():
        assert torch.equal(last.policy.trainable[0], run.ema[0])
    with best.averaged():
        assert torch.equal(best.policy.trainable[0], run.policy.trainable[0])


def test_sample(capsys):
    from PIL import Image

    trained()
    assert evaluate("sample", "run", "a red circle", "a blue cross", "--n", 3) == 0
    path = ev.Path(capsys.readouterr().out.strip())
    assert Image.open(path).size == (3 * 132, 2 * 132)
    before = path.read_bytes()
    evaluate("sample", "run", "a red circle", "a blue cross", "--n", 3)
    assert path.read_bytes() == before
    evaluate("sample", "run", "a red circle", "a blue cross", "--n", 3, "--seed", 1)
    assert path.read_bytes() != before


@pytest.mark.parametrize("argv, words", [
    (("sample", "run", "a pink circle"), ("pink", "red|green|blue|yellow", "circle|square")),
    (("sample", "nowhere", "a red circle"), ("nowhere", "no configuration")),
    (("score", "nowhere"), ("nowhere", "no configuration")),
    (("score", "run", "--n", "0"), ("--n", "1 or more")),
    (("score", "run", "--metrics", "colur"), ("colur", "did you mean colour?")),
    (("score", "run", "--prompts", "gone.txt"), ("gone.txt",)),
    (("score", "run", "--prompts", "dogs.txt"), ("a dog", "circle|square")),
    (("scroe", "run"), ("scroe", "score")),
    ((), ("required",)),
])
def test_usage_errors(argv, words, capsys, tmp_path):
    trained()
    (tmp_path / "dogs.txt").write_text("a dog\n")
    capsys.readouterr()
    assert evaluate(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("evaluate: ") and err.count("\n") == 1 and all(w in err for w in words)


def test_hpdv2_unreachable(monkeypatch, capsys):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise OSError("offline")

    trained()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    assert evaluate("score", "run", "--prompts", "hpdv2") == 2
    assert "zhwang/HPDv2" in capsys.readouterr().err


# ---- measures -----------------------------------------------------------------------
def say(colour, shape):
    return [f"a {colour} {shape}"] * 4


@pytest.mark.parametrize("caption", T.CAPTIONS)
def test_measures_of_clean_drawings(caption):
    """Every drawing has the right colour and shape, and none of the other captions'."""
    images, (_, colour, shape) = T.draw_caption(caption), caption.split()
    for c in T.COLOURS:
        assert ev.right_colour(images, say(c, shape)).tolist() == [c == colour] * 4
    for s in T.SHAPES:
        assert ev.right_shape(images, say(colour, s)).tolist() == [s == shape] * 4
    assert ev.clean_background(images, [caption] * 4).tolist() == [1] * 4
    assert ev.match(images)[1].tolist() == [0, 1, 2, 3] and ev.spread(images) == pytest.approx(1)
    assert ev.spread(images[:1].repeat(3, 1, 1, 1)) == 0


def test_shape_ignores_colour_and_colour_ignores_shade():
    images = T.draw_caption("a red cross")
    assert ev.right_shape(images.flip(1), say("red", "cross")).tolist() == [1] * 4
    assert ev.right_colour(0.6 * images + 0.3, say("red", "circle")).tolist() == [1] * 4


def test_measures_of_nothing_and_of_dirt():
    for value in (0.0, 1.0):  # all ink, no ink
        blank = torch.full((4, 3, 16, 16), value)
        assert ev.right_shape(blank, say("red", "circle")).sum() == 0
        assert ev.spread(blank) == 0
    assert ev.right_colour(torch.ones(4, 3, 16, 16), say("red", "circle")).sum() == 0
    dirty = T.draw_caption("a red circle")
    dirty[:, :, :, 15] = 0.7  # one of 16 columns is grey: not ink, not paper
    assert (ev.clean_background(dirty, say("red", "circle")) < 0.95).all()


def test_drift_measures_by_hand():
    half = torch.zeros(1, 3, 4, 4)
    half[:, 0, :, 2:] = 1  # right half red; one of 3 x-differences in one of 3 channels
    assert ev.saturation(half, [""]).item() == 0.5
    assert ev.sharpness(half, [""]).item() == pytest.approx(1 / 9)
    assert ev.prompt_diversity(half.repeat(3, 1, 1, 1)) == 0
    assert ev.prompt_diversity(torch.cat([half * 0, half * 0 + 0.25])) == pytest.approx(0.25)
    black_white = torch.arange(2.0)[:, None, None, None].expand(2, 3, 64, 64)
    assert ev.prompt_diversity(black_white) == pytest.approx(1)


# ---- statistics ---------------------------------------------------------------------
def test_interval_covers_and_excludes():
    """A difference of 0.1 with noise 0.2: 256 values have a standard error of 0.0125."""
    gen = torch.Generator().manual_seed(0)
    low, high = ev.bootstrap(0.1 + 0.2 * torch.randn(16, 16, generator=gen))
    assert 0 < low < 0.1 < high and 0.03 < high - low < 0.09
    low, high = ev.bootstrap(0.2 * torch.randn(16, 16, generator=gen))
    assert low < 0 < high


def test_interval_sees_clusters():
    """16 prompts that differ by 1: the interval is that of 16 values, not of 256."""
    gen = torch.Generator().manual_seed(0)
    clustered = torch.randn(16, 1, generator=gen).expand(16, 16)
    low, high = ev.bootstrap(clustered)
    assert high - low == pytest.approx(2 * 1.96 * clustered[:, 0].std().item() / 4, rel=0.1)


def test_interval_of_few():
    constant = torch.tensor([[1.0] * 8, [3.0] * 8])
    assert ev.bootstrap(constant) == (2, 2)  # 2 prompts are kept, their images are alike
    assert math.isnan(ev.bootstrap(torch.ones(1, 1))[0])


def test_alarms():
    row = {"base": 1.0, "difference": -0.3, "low": -0.4, "high": -0.2}
    assert ev.alarm("sharpness", row, []) == "drift -30%"
    assert ev.alarm("colour", row, []) == "falls -30%"
    assert ev.alarm("colour", row | {"high": 0.1}, []) == ev.alarm("colour", row, ["colour"]) == ""
    assert ev.alarm("spread", row | {"difference": 0.9}, []) == ""


# ---- score --------------------------------------------------------------------------
def results(folder="run"):
    summary = json.loads(ev.Path(folder, "score", "summary.json").read_text())
    return {(r["run"], r["metric"]): r for r in summary["results"]}


def test_base_against_base_is_zero():
    trained()
    assert evaluate("score", "run", "--weights", "base", "--n", 2) == 0
    for row in results().values():
        assert row["difference"] == row["low"] == row["high"] == 0 and row["win_rate"] == 0.5


def test_equal_weights_are_equal():
    """Other run, same weights as the base: equal noise makes equal images."""
    trained(shift=0)
    evaluate("score", "run", "--n", 2)
    assert all(r["difference"] == 0 for r in results().values())


def test_score_of_two_runs(capsys, monkeypatch):
    trained(name="a")
    trained(name="b")
    made = []
    sample = T.Run.sample
    monkeypatch.setattr(T.Run, "sample", lambda *args: made.append(1) or sample(*args))
    command = ("score", "a", "b", "--n", 3, "--metrics", "shapes", "colour")
    assert evaluate(*command) == 0
    assert len(made) == 3 * 16  # the base once
    first, files = results("a"), sorted(p.name for p in ev.Path("a/score").iterdir())
    assert files == ["grid.png", "prompts.csv", "summary.json", "summary.md"]
    assert {k[0] for k in first} == {"a", "b"}
    lines = ev.Path("a/score/prompts.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 16 * 6  # runs, prompts, measures
    out = capsys.readouterr().out
    assert "closed set" in out and "| colour |" in out

    made.clear()
    assert evaluate(*command) == 0 and not made and results("a") == first
    assert evaluate("score", "a", "--n", 3, "--seed", 1) == 0 and len(made) == 2 * 16


def test_images_do_not_depend_on_other_prompts(tmp_path):
    trained()
    (tmp_path / "one.txt").write_text("a blue cross\n\na blue cross\n")
    assert evaluate("score", "run", "--n", 2, "--prompts", "one.txt") == 0
    (folder,) = tmp_path.glob("run/eval-*")
    (png,) = folder.iterdir()
    before = png.read_bytes()
    png.unlink()
    evaluate("score", "run", "--n", 2)
    assert png.read_bytes() == before and len(list(folder.iterdir())) == 16


def test_new_weights_are_new_images(tmp_path):
    run = trained()
    evaluate("score", "run", "--n", 1)
    run.policy.trainable[0].data += 1
    run.policy.export(run.cfg.folder / "best")
    evaluate("score", "run", "--n", 1)
    assert len(list(tmp_path.glob("run/eval-*"))) == 2


def test_user_metric(tmp_path, monkeypatch):
    trained()
    (tmp_path / "mine.py").write_text("def dark(x, prompts):\n    return -x.mean((1, 2, 3))\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert evaluate("score", "run", "--n", 2, "--metrics", "mine:dark") == 0
    assert ("run", "mine:dark") in results()
