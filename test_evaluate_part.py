"""Tests of evaluate.py: health, comparison, self-check, study of the gradient. The head is that of
test_treegrpo.py, in short."""
import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import tensor

import evaluate as ev
import treegrpo as t

torch.set_num_threads(1)
t.BASE.update(width=32, blocks=2, heads=2)

@pytest.fixture(scope="session", autouse=True)
def random_base(tmp_path_factory):
    def weights(kind, net):
        torch.manual_seed(len(kind))
        for block in net.blocks:
            torch.nn.init.normal_(block.ada.weight, std=0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(t, "pretrain", weights)
        for kind in ("tiny", "tiny-ddpm"):
            t.tiny_base(kind)
        yield

@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ev, "draw_run", lambda run: None)
    torch.manual_seed(0)

def evaluate(*argv):
    return ev.main([str(a) for a in argv])

# ==== evaluate.py: 7. Health ====================================================================
GOOD = {"reward": 0.5, "zero_std_frac": 0.1, "ratio_max/0": 0.0, "grad_norm/0": 0.1,
        "grad_norm/1": 0.1, "clip_low/1": 0.1, "clip_high/1": 0.1, "saturation": 0.1,
        "diversity": 0.2}

def test_warn_by_hand():
    bad = GOOD | {"zero_std_frac": 0.9, "clip_low/1": 0.6}
    assert ev.warn([GOOD] * 30) == ev.warn([GOOD] * 5 + [bad] * 9) == ev.warn([bad] * 9 + [GOOD])
    found = ev.warn([GOOD] * 5 + [bad] * 10)
    assert [w.split()[0] for w in found] == ["zero_std_frac", "clip"]
    assert ev.warn([GOOD] * 5 + [bad] * 11) == []  # said once, and again much later
    assert len(ev.warn([bad] * 100)) == 2
    assert len(ev.warn([{"eval": 0.5}] + [bad] * 5 + [{"skipped": "x"}] + [bad] * 5)) == 2
    assert ev.warn([GOOD | {"clip_low/1": 0.0, "clip_high/1": 0.0}] * 10)[0].startswith("clip 0")
    assert ev.warn([GOOD | {"grad_norm/0": math.nan, "grad_norm/1": math.nan}] * 10)

def test_a_run_advises_once(capsys):
    Path("mine.py").write_text("def flat(images, prompts):\n    return 0 * images[:, 0, 0, 0]\n")
    flags = ("--reward mine:flat --iterations 12 --prompts-per-iteration 1 --branch 2 --depth 1 "
             "--eval-images 1 --steps 2 --out run")
    t.train(t.parse(flags.split()))
    err = capsys.readouterr().err
    assert err.count("advice: zero_std_frac 1 is outside 0 to 0.5 for 10 iterations") == 1

# ==== 9. compare ================================================================================
SMALL = "--steps 4 --prompts-per-iteration 2 --eval-images 32 --depth 2".split()

def curve(*pairs):
    return [{"cost": c, "cpu": c / 10, "wall": c / 5, "reward": r, "iteration": n}
            for n, (c, r) in enumerate(pairs)]

def test_cost_to_level_interpolates_and_takes_the_first_crossing():
    points = curve((0, 0.5), (100, 0.6), (200, 0.55), (300, 0.75))
    for level, cost in ((0.5, 0), (0.55, 50), (0.6, 100), (0.65, 250), (0.8, math.inf)):
        assert ev.cost_to(points, level) == pytest.approx(cost)
    assert ev.cost_to(points, 0.65, "cpu") == pytest.approx(25)

def test_summary_by_hand():
    def result(*pairs):
        return {"config": dataclasses.asdict(t.resolve({})), "points": curve(*pairs),
                "seconds": "cpu", "failed": ""}
    slow = [result((0, 0.5), (100, best)) for best in (0.6, 0.7, 0.8)]
    row = ev.summarise([result((0, 0.5), (50, 0.9), (100, 0.8))], [0.6, 0.95], {"slow": slow})
    assert (row["leaves"], row["trained nodes"]) == (27, 13)
    assert (row["peak"], row["final"]) == ([0.9, 0.9, 0.9], [0.8, 0.8, 0.8])
    assert (row["cost to 0.6"], row["cost to 0.95"]) == (pytest.approx(12.5), math.inf)
    # the median best of slow is .7, reached at 100, 66.7 and never; the other is there at 25
    assert row["cost to best of slow, ×"] == row["seconds to best of slow, ×"] == pytest.approx(4)
    assert ev.summarise(slow, [], {"slow": slow})["cost to best of slow, ×"] == 1

@pytest.mark.parametrize("method", ("treegrpo-fast", "dancegrpo", "flow-grpo", "dynamic-treerpo"))
def test_costs_are_those_of_nfe_and_stay_within_the_budget(method):
    flags, costs = ["--method", method], []
    cfg = ev.make_job(flags, 3, 50_000, 1, Path("x")).cfg
    for n in range(cfg.iterations + 1):
        sample, train = t.nfe(t.schedule(cfg, n), cfg.roots, cfg.inner_epochs)
        costs.append(8 * (sample + (4 if cfg.kl else 3) * train))
    assert sum(costs[:-1]) <= 50_000 < sum(costs)
    assert ev.make_job(flags, 3, 1, 1, Path("x")).cfg.iterations == 1

def test_compare_writes_all_and_caches(monkeypatch):
    argv = ["compare", "--methods", "dancegrpo", "--set",
            "k 2:treegrpo:branch=2,no-full,sibling_norm=std", "--seeds", 0, 1, "--budget", 900,
            "--every", 300, "--baseline", "dancegrpo", "--levels", 0.1, "--out", "cmp", "--tune",
            1e-4, 1e-3, "--lr", "k 2=0.002", *SMALL]
    assert evaluate(*argv) == 0
    made = json.loads(Path("cmp/compare.json").read_text())
    assert set(made["rows"]) == {"dancegrpo", "k 2"} and made["rows"]["k 2"]["lr"] == 0.002
    assert [row["lr"] for row in made["tuning"]] == [1e-4, 1e-3]  # the other's rate is given
    assert made["rows"]["dancegrpo"]["lr"] == max(made["tuning"], key=lambda row: row["peak"])["lr"]
    for name in ("compare.md", "pareto.png", "credit.png"):
        assert Path("cmp", name).stat().st_size > 500
    runs = [json.loads(f.read_text()) for f in Path("cmp/runs").glob("*.json")]
    assert len(runs) == 2 + 4 and len({r["points"][0]["reward"] for r in runs}) == 1
    for r in runs:
        cfg, spent = t.Config(**t.tuples(r["config"])), [p["cost"] for p in r["points"]]
        assert spent[-1] == sum(ev.iteration_cost(cfg, n) for n in range(cfg.iterations))
        assert spent == sorted(set(spent)) and spent[-1] <= r["budget"]
        assert max(b - a for a, b in itertools.pairwise(spent)) < 350 + ev.iteration_cost(cfg, 0)
        assert {"reward", "eval_diversity", "places", "diversity"} <= r["points"][-1].keys()
    monkeypatch.setattr(ev, "run_job", lambda job: pytest.fail("ran again"))
    first = Path("cmp/compare.md").read_text()
    assert evaluate(*argv) == 0 and Path("cmp/compare.md").read_text() == first

def test_a_result_is_named_by_what_it_depends_on(tmp_path):
    path = ev.make_job(["--track", "json:dumps", "--eval-every", "3"], 0, 900, 300, tmp_path).path
    assert path == ev.make_job([], 0, 900, 300, tmp_path).path
    for change in ((["--lr", "1e-4"], 0, 900, 300), ([], 1, 900, 300), ([], 0, 901, 300),
                   ([], 0, 900, 301)):
        assert ev.make_job(*change, tmp_path).path != path

def test_two_processes_give_what_one_gives(monkeypatch):
    for key, size in (("width", 96), ("blocks", 3), ("heads", 4)):
        monkeypatch.setitem(t.BASE, key, size)  # the workers see the defaults
    curves = []
    for workers in (1, 2):
        jobs = {s: ev.make_job(SMALL, s, 300, 300, Path(str(workers))) for s in (0, 1)}
        runs = ev.run_jobs(jobs, workers)
        curves.append([[p["reward"] for p in runs[s]["points"]] for s in (0, 1)])
    assert curves[0] == curves[1] and curves[0][0] != curves[0][1]

def test_counted_evaluations_are_the_cost(tmp_path):
    job = ev.make_job([*SMALL, "--inner-epochs", "2"], 0, 300, 300, tmp_path)
    log = t.Run(job.cfg).train_iteration()
    counted = log["evaluations_sample"] + 3 * log["evaluations_update"]
    assert ev.iteration_cost(job.cfg, 0) == counted

def test_a_killed_run_is_done_again(tmp_path, monkeypatch):
    job, real, calls = ev.make_job(SMALL, 0, 900, 300, tmp_path), t.Run.train_iteration, []
    def killed(run):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(run)
    monkeypatch.setattr(t.Run, "train_iteration", killed)
    with pytest.raises(KeyboardInterrupt):
        ev.run_jobs({"a": job}, 1)
    assert not job.path.exists()
    again = ev.run_jobs({"a": job}, 1)["a"]
    fresh = ev.run_job(ev.make_job(SMALL, 0, 900, 300, tmp_path / "other"))
    keep = [[(p["cost"], p["reward"]) for p in r["points"]] for r in (again, fresh)]
    assert keep[0] == keep[1]

def test_three_failures_end_a_run_and_are_told(monkeypatch, capsys):
    def bad(run):
        raise t.NumericalError("loss is not finite")
    monkeypatch.setattr(t.Run, "train_iteration", bad)
    assert evaluate("compare", "--methods", "treegrpo", "--budget", 2000, *SMALL) == 0
    assert "treegrpo stopped early: loss is not finite" in capsys.readouterr().out

@pytest.mark.parametrize("argv, message", (
    ("--methods treegrp", "did you mean treegrpo"), ("", "--methods or --set"),
    ("--methods treegrpo --lr tree=1e-4", "--lr tree=1e-4: allowed are treegrpo=X"),
    ("--methods treegrpo --baseline mixgrpo", "--baseline mixgrpo: allowed are treegrpo"),
    ("--set alone", "LABEL:METHOD"), ("--set a:treegrpo:depht=2", "did you mean --depth"),
    ("--methods treegrpo --modle tiny", "did you mean --model")))
def test_bad_comparisons_are_refused_before_anything_runs(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(ev, "run_job", lambda job: pytest.fail("ran"))
    assert evaluate("compare", *argv.split()) == 2
    assert message in capsys.readouterr().err

# ==== 10. check =================================================================================
@pytest.mark.parametrize("flags", (
    "--method treegrpo", "--method dynamic-treerpo", "--method flow-grpo --roots 4",
    "--model tiny-ddpm --ema 0.9"))
def test_check_passes(flags, capsys):
    assert evaluate("check", "--prompts-per-iteration", 2, *flags.split()) == 0
    assert "no faults" in capsys.readouterr().out

class Dropped(t.TinyPolicy):
    def denoise(self, x, i, cond):
        return torch.nn.functional.dropout(super().denoise(x, i, cond), 0.1)

class OtherReference(t.TinyPolicy):
    def __init__(self, cfg, device):
        super().__init__(cfg, device)
        self.initial[-1] += 0.1

class WrongStep(t.TinyPolicy):
    def step(self, x, pred, i, j, noise):
        mean, std = super().step(x, pred, i, j, noise)
        return (mean if noise else 1.01 * mean), std

class NoGradient(t.TinyPolicy):
    def __init__(self, cfg, device):
        super().__init__(cfg, device)
        self.net.unused = torch.nn.Parameter(torch.ones(3))
        self.trainable.append(self.net.unused)
        self.initial.append(torch.ones(3))

class LossyExport(t.TinyPolicy):
    def export(self, folder):
        state = self.net.state_dict()
        t.save_atomic({k: v for k, v in state.items() if k != "head.bias"}, folder / "model.pt")

    def restore(self, folder):
        self.net.load_state_dict(torch.load(folder / "model.pt"), strict=False)

class MovesFrozen(t.TinyPolicy):
    def __init__(self, cfg, device):
        super().__init__(cfg, device)
        self.net.register_buffer("seen", torch.zeros(()))

    def denoise(self, x, i, cond):
        self.net.seen += 1
        return super().denoise(x, i, cond)

class Wasteful(t.TinyPolicy):
    def step(self, x, pred, i, j, noise):
        self.evaluations += 1
        return super().step(x, pred, i, j, noise)

@pytest.mark.parametrize("fault, row", (
    (Dropped, "ratio is 1 before an update"), (OtherReference, "KL to the reference is 0 at first"),
    (WrongStep, "noise 0 is the plain ODE sampler"), (LossyExport, "export round trip"),
    (NoGradient, "an update moves every trainable"), (MovesFrozen, "and nothing else"),
    (Wasteful, "denoiser evaluations as planned")))
def test_check_names_a_planted_fault(fault, row, monkeypatch, capsys):
    monkeypatch.setitem(t.FAMILIES, "tiny", (fault, {}))
    assert evaluate("check", "--prompts-per-iteration", 2, "--branch", 2, "--depth", 2) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAIL")]
    assert any(row in line for line in failed)
    assert len(failed) == 1 or fault is Dropped  # which spoils the sampler as well
    assert "->" in lines[lines.index(failed[0]) + 1]
    assert fault is not NoGradient or "net.unused" in failed[0]

def test_check_finds_a_checkpoint_that_loses_the_optimiser(monkeypatch, capsys):
    real = t.Run.load
    def forgetful(run, path):
        real(run, path)
        for state in run.optimizer.state.values():
            state["exp_avg"].zero_()
    monkeypatch.setattr(t.Run, "load", forgetful)
    assert evaluate("check", "--prompts-per-iteration", 2) == 1
    assert "FAIL  checkpoint round trip" in capsys.readouterr().out

def test_check_documents_health(capsys):
    with pytest.raises(SystemExit):
        evaluate("check", "--help")
    out = capsys.readouterr().out
    assert all(f"  {name}, " in out for name in ev.HEALTH)

# ==== 11. why ===================================================================================
CHAINS = "--sibling-norm none --loss-reduce layer"
WINDOW = "--window-mode fixed --window-start 2 --micro-batch 1000000"

@pytest.mark.parametrize("flags", (
    f"--roots 8 --branch 1 {CHAINS}", f"--branch 8 1 {CHAINS}", "--loss-reduce layer",
    f"--roots 8 --branch 1 --depth 0 --window-start 0 {CHAINS}", "--loss-reduce layer --sde dance",
    "--loss-reduce layer --branch 2 --tail-steps 2"))
def test_estimators_agree_with_the_exact_gradient(flags):
    cfg = t.parse(f"{WINDOW} {flags}".split())
    g, exact = ev.gaussian_estimates(cfg, 30_000, raw=True), ev.exact_gradient(cfg)
    error, trained = g.std(0) / len(g) ** 0.5, exact != 0
    assert (g[:, ~trained] == 0).all() and trained.sum() == cfg.window
    assert ((g.mean(0) - exact).abs()[trained] < 4 * error[trained]).all()
    assert (error[trained] < 0.2 * exact.abs().max()).all()

def test_exact_gradient_is_the_slope_of_the_reward():
    cfg, rewards = t.parse(WINDOW.split()), []
    policy, steps = ev.GaussianFlow(cfg), t.schedule(cfg, 0)
    for sign in (-1, 1):
        theta = torch.zeros(1, cfg.steps)
        theta[0, 3] = 0.2 * sign
        gen = torch.Generator().manual_seed(0)  # the same noise for both
        tree = t.rollout(policy, {"theta": theta}, torch.zeros(40_000, dtype=torch.long), [
            dataclasses.replace(s, children=1) for s in steps],
            lambda level, p, gen=gen: torch.randn(len(p), 1, 1, 1, generator=gen), 10**6)
        rewards.append(policy.reward(tree.leaves).mean().item())
    slope = (rewards[1] - rewards[0]) / 0.4
    assert slope == pytest.approx(ev.exact_gradient(cfg)[3].item(), rel=0.05)

def test_without_centring_early_steps_count_less():
    cfg = t.parse(f"{WINDOW} --loss-reduce layer".split())
    centred, plain = (ev.gaussian_estimates(dataclasses.replace(cfg, sibling_norm=norm), 30_000)
                      .mean(0)[2:5] for norm in ("center", "none"))
    # (k^l - 1) / k^l of the group's mean is the edge itself
    assert (plain / centred).tolist() == pytest.approx([2 / 3, 8 / 9, 26 / 27], abs=0.04)

def test_moments_by_hand():
    gen = torch.Generator().manual_seed(0)
    g = tensor([3.0, 4.0]) + 2 * torch.randn(4000, 2, generator=gen)
    signal, spread, error = ev.moments(g.double()).tolist()
    assert signal == pytest.approx(25, abs=4 * error**0.5) and error**0.5 < 0.5
    assert spread == pytest.approx(8, rel=0.1)
    gram = g[:5] @ g[:5].T  # the definition: products of different estimates
    want = (gram.sum() - gram.trace()) / 20
    assert ev.moments(g[:5])[0].item() == pytest.approx(want.item(), rel=1e-4)

def test_why_writes_table_and_figure():
    argv = ("why", "--trees", 200, "--tiny-trees", 3, "--states", 1, "--out", "why")
    assert evaluate(*argv) == 0
    study = json.loads(Path("why/why.json").read_text())
    assert set(study["tiny"]) == set(ev.TINY_ROWS) <= set(study["gaussian"])
    assert Path("why/why.png").stat().st_size > 5000
    assert "| tree, center, layer | 189 |" in Path("why/why.md").read_text()
