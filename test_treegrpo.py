"""Tests of treegrpo.py, in the order of its sections: python -m pytest test_treegrpo.py"""

import dataclasses
import fcntl
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import tensor

import treegrpo as t

torch.set_num_threads(1)
t.BASE.update(width=32, blocks=2, heads=2)  # the same network, smaller
FIELDS = {f.name: f for f in dataclasses.fields(t.Config)}
MODELS, SOURCE, PRETRAIN = ("tiny", "tiny-ddpm"), Path(t.__file__), t.pretrain
HOOK = {}  # what the reward `hooked` does: the tests set it
each_model = pytest.mark.parametrize("model", MODELS)
each_method = pytest.mark.parametrize("method", t.PRESETS)
each_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.float64))


def hooked(images, prompts):
    return HOOK.get("reward", t.shapes_reward("cpu"))(images, prompts)


@pytest.fixture(scope="session", autouse=True)
def random_base(tmp_path_factory):
    """Random weights in place of the trained base, in a cache of our own."""
    def weights(kind, net):
        torch.manual_seed(len(kind))
        for block in net.blocks:
            torch.nn.init.normal_(block.ada.weight, std=0.2)  # open gates
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(t, "pretrain", weights)
        for kind in MODELS:
            t.tiny_base(kind)
        patch.setattr(t, "pretrain", None)  # cached from here on
        yield


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    HOOK.clear()


def config(method="treegrpo", **flags):
    """A preset with few roots, children and prompts."""
    preset = t.PRESETS[method]
    small = {"roots": min(preset.get("roots", 1), 2), "prompts_per_iteration": 2, "iterations": 2,
                 "branch": tuple(min(k, 3) for k in preset.get("branch", (3,))), "eval_images": 4,
                 "eval_every": 2, "lr": 1e-3}
    cfg = t.resolve({"method": method} | small | flags)
    t.check_config(cfg)
    return cfg


def make_tree(*parents, prompt=(0,), log_prob=None, std=None, x=None):
    """Tree given by the parents of each level's edges; the nodes of level 0 are the roots."""
    levels, of, root = [], tensor(prompt), torch.arange(len(prompt))
    for n, parent in enumerate(map(tensor, parents)):
        here = torch.randn(len(of), 1, 1, 2) if x is None else x[n].view(-1, 1, 1, 1)
        old = torch.zeros(len(parent)) if log_prob is None else log_prob[n]
        levels.append(t.Level(t.Step(n, n + 1, 2, 0.5, True), here, here.clone(), of, parent,
                              torch.zeros(len(parent), *here.shape[1:]), old,
                              tensor(std[n] if std else 0.5)))
        of, root = of[parent], root[parent]
    return t.Tree(levels, torch.zeros(len(of), 1, 1, 2), of, root)


def close(a, b, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=rtol, atol=atol,
                               check_dtype=False)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def one_error(capsys, *fragments):
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(f in err for f in fragments), err


# ---- 1. Configuration and command line ------------------------------------------------------
def test_flags_cover_every_field_and_override():
    argv = []
    for f in FIELDS.values():
        flag = "--" + f.name.replace("_", "-")
        if isinstance(f.default, bool):
            argv += [flag.replace("--", "--no-")]
        elif f.name != "resume" and f.default != ():
            argv += [flag, *map(str, f.default if isinstance(f.default, tuple) else [f.default])]
    assert t.parse(argv) == t.Config()
    assert t.parse(argv + ["--seed", "3", "--branch", "4", "2", "--plan"]) == \
        t.Config(seed=3, branch=(4, 2), plan=True)
    assert t.parse(["--method", "branchgrpo", "--steps", "21"]).steps == 21


@each_model
@each_method
def test_presets_resolve_on_every_model(method, model, capsys):
    argv = ["--method", method, "--model", model, "--plan", "--guidance", "2"]
    assert t.main(argv) == 0 and model in capsys.readouterr().out
    assert all(getattr(t.parse(argv), k) == v for k, v in t.PRESETS[method].items()
               if k != "noise_level" or model == "tiny")


def out_of_range():
    """Bad (flags, flag, value, allowed) for every limit and type of every field."""
    for name, f in FIELDS.items():
        m, many = f.metadata, isinstance(f.default, tuple)
        kind = type([*f.default, ""][0] if many else f.default)
        lo, hi, above, choices = (m[k] for k in ("lo", "hi", "above", "choices"))
        rows = [(kind(lo - 1), f">= {lo}")] if lo is not None else []
        rows += [(above, f"> {above}")] if above is not None else []
        rows += [(kind(hi + 1), f"<= {hi}")] if hi is not None else []
        rows += [(choices[-1] + "x", f"did you mean {choices[-1]}?")] if choices else []
        rows += [("ten", f"invalid {kind.__name__}")] if kind in (int, float) else []
        rows += [("nan", "must be"), ("inf", "finite")] if kind is float else []
        flag, gap = "--" + name.replace("_", "-"), "=" if kind is bool else " "
        for value, allowed in rows + [("maybe", "maybe")] * (kind is bool):
            yield f"{flag}{gap}{value}", flag, str(value), allowed


BAD = [  # flags, fragments of the message
    ("--model tinny", "tinny", "did you mean tiny?", "tiny-ddpm"),
    ("--method tree-grpo", "tree-grpo", "did you mean treegrpo?", "dancegrpo"),
    ("--reward shaeps", "shaeps", "did you mean shapes?", "MODULE:FUNCTION"),
    ("--reward shapes:nan", "shapes:nan"), ("--reward shapes shapes:2", "shapes", "once"),
    ("--reward no_such_module:f", "no_such_module"), ("--reward math:no_such", "no_such"),
    ("--prompts missing.txt", "missing.txt", "No such file"),
    ("--device nowhere", "nowhere", "cpu"), ("--device cuda:99", "cuda:99", "cpu"),
    ("--out /dev/null/x", "/dev/null/x"), ("--resume nothing", "nothing"),
    ("--depth 10", "10", "0 to 9"), ("--steps 3 --depth 3", "3", "0 to 2"),
    ("--window-mode fixed --window-start 7", "--window-start 7", "0 to 6"),
    ("--window-mode sliding --window-start 9 --depth 4", "9", "0 to 5"),
    ("--branch 1", "--branch 1", "2 or more"), ("--branch 3 0", "0", ">= 1"),
    ("--method flow-grpo --roots 1", "--roots 1", "2 or more"),
    ("--method tempflow-grpo --branch 1", "--group root", "2 or more"),
    ("--branch 2 2 2 2", "2 2 2 2", "3"), ("--noise-level 0", "--noise-level 0", "> 0"),
    ("--sde cps --noise-level 1.1", "1.1", "at most 1"),
    ("--sde cps --noise-growth 1", "reaches 1.4", "at most 1"),
    ("--model tiny-ddpm --noise-level 1.01", "1.01", "at most 1"),
    ("--clip-min .1", "--clip-min 0.1", "--clip-max"),
    ("--clip-min .1 --clip-max .05", "0.1", "--clip-max 0.05"),
    ("--noise-levle 0.5", "--noise-levle", "did you mean --noise-level?"),
    ("--step 5", "--step", "did you mean --steps?"), ("--branch", "--branch"),
    ("--prompts-per-iteration 2.5", "2.5", "int"), ("stray", "stray"),
    ("--reward-weights hpsv2=/no/folder", "/no/folder"), ("--reward-weights x=/", "x"),
    *out_of_range()]


@pytest.mark.parametrize("row", BAD, ids=[b[0] for b in BAD])
def test_bad_input_is_one_line(row, capsys, monkeypatch):
    monkeypatch.setattr(t.TinyPolicy, "__init__", None)  # no model may be built
    assert t.main(row[0].split()) == 2
    one_error(capsys, *row[1:])


def test_bad_input_covers_every_flag():
    flags = {word.split("=")[0] for row in BAD for word in row[0].split()}
    assert flags | {"--track"} >= {"--" + n.replace("_", "-") for n in FIELDS}


C = "a red circle"
FILES = [  # name, content, prompts or fragments of the message
    ("a.txt", f"{C}\n\n  \na blue cross  \n", [C, "a blue cross"]),
    ("a.txt", f"\ufeff{C}\r\n\r\na blue cross", [C, "a blue cross"]),
    ("a.jsonl", f'\ufeff{{"prompt": "{C}", "id": 1}}\r\n\r\n', [C]),
    ("a.jsonl", '{"prompt": "one\u2028line"}\n{"prompt": "b"}', ["one\u2028line", "b"]),
    ("a.txt", "", ("holds no prompt",)), ("a.txt", "\n \r\n", ("holds no prompt",)),
    ("a.txt", b"caf\xe9", ("a.txt", "utf-8")),
    ("a.jsonl", f'{{"prompt": "{C}"}}\n\n{{"prompt":', ("line 3", "prompt")),
    ("a.jsonl", '{"text": "x"}', ("line 1", "'prompt'")),
    ("a.jsonl", '{"prompt": 3}', ("line 1", "'prompt'")),
    ("a.jsonl", '["prompt"]', ("line 1", "'prompt'")),
    ("a.txt", f"{C}\na purple dog", ("purple dog", "red", "circle")),
    ("a.txt", "circle", ("circle", "red"))]


@pytest.mark.parametrize("name, content, expected", FILES)
def test_prompt_files(name, content, expected, capsys, monkeypatch):
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, list):
        assert t.read_prompts(name) == expected
    else:
        monkeypatch.setattr(t.TinyPolicy, "__init__", None)
        assert t.main(["--prompts", name]) == 2
        one_error(capsys, *expected)


def test_help_needs_only_torch():
    code = ("import sys, runpy\nclass Block:\n def find_spec(self, name, *_):\n"
            "  if name.split('.')[0] in ('diffusers', 'transformers', 'peft', 'tqdm', 'matplotlib',"
            " 'PIL', 'safetensors', 'evaluate'): raise ImportError(name)\n"
            f"sys.path.insert(0, {str(SOURCE.parent)!r})\n"
            f"sys.meta_path.insert(0, Block())\nsys.argv = ['treegrpo.py', '--help']\n"
            f"runpy.run_path({str(SOURCE)!r}, run_name='__main__')")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    text = " ".join(out.stdout.split())
    assert out.returncode == 0 and not out.stderr
    assert all(f.metadata["help"] in text for f in FIELDS.values())


def test_program_refuses_without_traceback():
    out = subprocess.run([sys.executable, str(SOURCE), "--steps", "1"], capture_output=True,
                         text=True, timeout=60)
    assert (out.returncode, out.stdout) == (2, "") and out.stderr.count("\n") == 1
    assert "--steps 1" in out.stderr and ">= 2" in out.stderr


# ---- 2. Schedule ----------------------------------------------------------------------------
def fixed(start=0, **kw):
    return t.schedule(config(window_mode="fixed", window_start=start, **kw), 0)


def test_window_law_by_hand_and_sampled():
    p = t.window_probs(10, 3, 0.5)  # (1 - r) r^i / (1 - r^7): .5 / (127/128) = 64/127, 32/127, ...
    close(p, tensor([64, 32, 16, 8, 4, 2, 1], dtype=torch.float64) / 127, rtol=1e-12)
    cfg = config()
    starts = tensor([t.window_start(cfg, i) for i in range(1000)])
    freq = starts.bincount(minlength=7) / 1000
    assert ((freq - p).abs() < 4 * (p * (1 - p) / 1000).sqrt()).all()


def test_window_slides_and_wraps():
    cfg = config(window_mode="sliding", depth=4, window_start=1, window_every=2, window_stride=2)
    assert [t.window_start(cfg, i) for i in range(9)] == [1, 1, 3, 3, 5, 5, 1, 1, 3]
    assert {t.window_start(config(window_mode="fixed", window_start=4), i) for i in range(9)} == {4}


@pytest.mark.parametrize("start, tail, expected", [
    (0, 2, [(3, 7), (7, 10)]), (0, 1, [(3, 10)]), (2, 3, [(5, 7), (7, 8), (8, 10)]),
    (5, 9, [(8, 9), (9, 10)]), (6, 2, [(9, 10)]), (4, 0, [(7, 8), (8, 9), (9, 10)])])
def test_tail_grid(start, tail, expected):
    steps = [(s.i, s.j) for s in fixed(start, tail_steps=tail)]
    assert steps == [(i, i + 1) for i in range(start + 3)] + expected


def test_noise_grows_with_depth():  # g(j) = 1 + .5 j / 3
    steps = fixed(depth=4, noise_growth=0.5, noise_level=0.6)
    close([s.noise for s in steps], [0.6, 0.7, 0.8, 0.9] + [0.0] * 6)
    close([s.noise for s in fixed(depth=3, noise_growth=-0.5)][:3], [0.7, 0.525, 0.35])
    assert fixed(depth=1, noise_growth=9.0, noise_level=0.6)[0].noise == 0.6


def test_train_fraction_draws_anew():
    cfg = config("dancegrpo")
    chosen = [tuple(s.i for s in t.schedule(cfg, i) if s.train) for i in range(20)]
    assert {len(c) for c in chosen} == {5} and len(set(chosen)) > 10  # 60 % of 9 steps
    assert sum(s.train for s in fixed(train_fraction=0.01)) == 1


@each_method
def test_last_step_is_deterministic(method):
    cfg = config(method)
    for i in range(30):
        steps = t.schedule(cfg, i)
        assert (steps[-1].children, steps[-1].noise, steps[-1].train) == (1, 0, False)
        assert steps[0].i == 0 and steps[-1].j == cfg.steps
        assert all(a.j == b.i and a.i < a.j for a, b in zip(steps, steps[1:], strict=False))
        assert all(s.noise or (s.children == 1 and not s.train) for s in steps)


def test_nfe_by_hand():  # start 0: 1 + 3 + 9, then 27 leaves for 7 steps = 202
    costs = [t.nfe(fixed(i)) for i in range(7)]
    assert costs == [(n, 13) for n in (202, 176, 150, 124, 98, 72, 46)]
    dance = t.parse(["--method", "dancegrpo", "--branch", "27", "1", "--train-fraction", "1"])
    assert t.nfe(t.schedule(dance, 0)) == (244, 217)
    assert t.nfe(fixed(), roots=2, inner_epochs=3, kl=True) == (404, 2 * 13 * 3 * 2)


# ---- 3. Samplers ----------------------------------------------------------------------------
STEPS = {  # at sigma = .6 -> .5, alpha = .4 -> .6
    "flow": lambda x, v, a, s=(0.6, 0.5): t.flow_sde_step(x, v, *s, a, 0.9),
    "dance": lambda x, v, a, s=(0.6, 0.5): t.dance_sde_step(x, v, *s, a),
    "cps": lambda x, v, a, s=(0.6, 0.5): t.cps_step(x, v, *s, a),
    "ddim": lambda x, v, a, s=(0.4, 0.6): t.ddim_step(x, v, *s, a)}


@each_dtype
@pytest.mark.parametrize("name", STEPS)
def test_steps_without_noise_and_types(name, dtype):
    x, v = torch.randn(2, 5, 3, 4, 4, dtype=dtype).unbind()
    mean, std = STEPS[name](x, v, 0.0)
    ode, ends = x - 0.1 * v, (0.6, 0.5)
    if name == "ddim":  # x0 from eps, then forward again with the same eps
        ode, ends = 0.6**0.5 * (x - 0.6**0.5 * v) / 0.4**0.5 + 0.4**0.5 * v, (0.4, 0.6)
    close(mean, ode)
    a = STEPS[name](x, v, 0.7)
    b = STEPS[name](x, v, tensor(0.7, dtype=torch.float64), tensor(ends, dtype=torch.float64))
    assert same(a, b) and std == 0 < a[1] and a[1].ndim == std.ndim == 0
    assert all(z.dtype == dtype for z in (mean, std, *a, *b))


def test_stds_by_hand():
    x = torch.ones(1, 1)
    close(t.flow_sde_step(x, x, 0.5, 0.4, 0.7, 0.9)[1], 0.7 * 0.1**0.5)  # rate .7 sqrt(.5/.5)
    close(t.flow_sde_step(x, x, 0.278, 0.0089, 0.7, 0.9601)[1], 0.2253, rtol=1e-3)  # SD3's last
    close(t.flow_sde_step(x, x, 1.0, 0.9, 0.7, 0.9)[1], 0.7 * 10**0.5 * 0.1**0.5)  # capped at .9
    close(t.dance_sde_step(x, x, 0.5, 0.4, 0.3)[1], 0.3 * 0.1**0.5)
    close(t.cps_step(x, x, 0.5, 0.4, 0.5)[1], 0.4 * math.sqrt(0.5))
    close(t.ddim_step(x, x, 0.4, 0.6, 0.5)[1], 0.5 * math.sqrt(0.4 / 0.6 * (1 - 0.4 / 0.6)))


def after_step(name, now, then, var, data, a):
    """Variance after a step from x of variance `var`, by the exact denoiser of N(0, data^2)."""
    one = torch.ones(1, dtype=torch.float64)
    v = (now - (1 - now) * data**2) / ((1 - now)**2 * data**2 + now**2)  # E[noise - x0 | x] / x
    mean, std = STEPS[name](one, v * one, a, (now, then))
    return (mean**2 * var + std**2).item()


@pytest.mark.parametrize("name", ("flow", "dance"))
@pytest.mark.parametrize("sigma", (0.3, 0.5, 0.7))
def test_sde_keeps_marginals_to_second_order(name, sigma):
    true = lambda s: (1 - s)**2 * 0.25 + s**2  # noqa: E731
    error = [after_step(name, sigma, sigma - dt, true(sigma), 0.5, 0.8) - true(sigma - dt)
             for dt in (0.02, 0.01)]
    assert 3.6 < error[0] / error[1] < 4.4


@pytest.mark.parametrize("name", ("cps", "ddim"))
@pytest.mark.parametrize("a", (0.0, 0.4, 1.0))
@pytest.mark.parametrize("now, then", ((0.9, 0.5), (0.6, 0.55), (0.3, 0.01)))
def test_exact_on_a_point_mass(name, a, now, then):
    n, data, ddim = tensor([0.0, 1.0], dtype=torch.float64), 1.7, name == "ddim"
    (p, q), (p2, q2) = [((1 - s)**0.5, s**0.5) if ddim else (1 - s, s) for s in (now, then)]
    ends = (1 - now, 1 - then) if ddim else (now, then)
    mean, std = STEPS[name](p * data + q * n, n if ddim else n - data, a, ends)
    close(mean[0], p2 * data, rtol=1e-9)  # the mean, at n = 0
    close((mean[1] - mean[0])**2 + std**2, q2**2, rtol=1e-9)  # and the variance


@pytest.mark.parametrize("T, ratio", ((10, 0.740), (40, 0.815), (640, 0.848)))
def test_cps_narrows_a_gaussian_at_any_step_count(T, ratio):
    var, grid = 1.0, torch.linspace(1, 0, T + 1, dtype=torch.float64).tolist()
    for now, then in zip(grid, grid[1:], strict=False):
        var = after_step("cps", now, then, var, 0.5, 0.7)
    close((var / 0.25)**0.5, ratio, atol=1e-3)


@each_dtype
def test_log_prob_and_kl_against_torch(dtype):
    x, mean, ref = torch.randn(3, 4, 3, 5, 5, dtype=dtype).unbind()
    std, normal = tensor(0.37, dtype=dtype), torch.distributions.Normal
    for reduce in ("mean", "sum"):
        got = t.gaussian_log_prob(x, mean, std, reduce)
        assert got.dtype == dtype and got.shape == (4,)
        close(got, getattr(normal(mean, std).log_prob(x).flatten(1), reduce)(1))
    kl = torch.distributions.kl_divergence(normal(mean, std), normal(ref, std))
    close(t.gaussian_kl(mean, ref, std), kl.flatten(1).mean(1))


# ---- 4. Tree and rollout --------------------------------------------------------------------
def grow(slots=(0, 1), **flags):
    run = t.Run(config(**flags))
    return run, run.grow(0, list(slots), [t.CAPTIONS[3 * s] for s in slots])[0]


@each_model
def test_tree_of_a_rollout(model):
    run, tree = grow(model=model, roots=2, branch=(3, 2, 1), window_mode="fixed", window_start=2,
                     tail_steps=2)
    assert [len(v.x) for v in tree.levels] == [4, 12, 24] and len(tree.leaves) == 24
    assert tree.prompt.tolist() == [0] * 12 + [1] * 12
    assert tree.root.tolist() == [r for r in range(4) for _ in range(6)]
    assert tree.path(0) == [0, 0, 0] and tree.path(23) == [11, 23, 23] and tree.path(9)[0] == 4
    assert tree.children((0, 1)) == [3, 4, 5] and tree.children((1, 11)) == [22, 23]
    noise = t.tree_noise((0, 0), [0, 1], (3, 16, 16))
    cond = run.policy.encode([t.CAPTIONS[0], t.CAPTIONS[3]])
    for n, v in enumerate(tree.levels):
        assert all(z.dtype == torch.float32 and not z.requires_grad and z.device.type == "cpu"
                   for z in (v.x, v.pred, v.sample, v.log_prob_old, v.std))
        with torch.no_grad():
            pred, mean, std = t.transition(run.policy, v.x, v.prompt, v.step, cond)
        sample = mean[v.parent] + std * noise(n + 1, v.prompt[v.parent])
        assert torch.equal(v.pred, pred) and torch.equal(v.sample, sample)
        law = torch.distributions.Normal(mean[v.parent], std)
        close(v.log_prob_old, law.log_prob(v.sample).flatten(1).mean(1))
        assert n == 0 or torch.equal(v.x, tree.levels[n - 1].sample)


def test_pruned_tree():  # children of A: 0 and 2; of B: 1. Leaf 0 hangs under edge 1 of level 1
    tree = make_tree([0, 0], [0, 1, 0], [1, 0, 2, 0])
    nodes = ((1, 0), (1, 1), (2, 0))
    assert [tree.children(n) for n in nodes] == [[0, 2], [1], [1, 3]]
    assert [tree.path(n) for n in range(4)] == [[1, 1, 0], [0, 0, 1], [0, 2, 2], [0, 0, 3]]


def test_prefix_is_evaluated_once_per_root(monkeypatch):
    seen, denoise = [], t.TinyPolicy.denoise
    monkeypatch.setattr(t.TinyPolicy, "denoise", lambda self, x, i, cond:
                        seen.append((i, len(x))) or denoise(self, x, i, cond))
    grow(window_mode="fixed", window_start=4, depth=2, roots=3)
    assert seen == list(enumerate([6] * 5 + [18] + [54] * 4))


@each_model
def test_rollout_does_not_depend_on_batching_or_order(model):
    slots, kw = [4, 0, 3], {"model": model, "noise_level": 0.7}
    whole = grow(slots, **kw)[1]
    for micro in (1, 5):
        tree = grow(slots, micro_batch=micro, **kw)[1]
        close(tree.leaves, whole.leaves, atol=1e-4)
        for a, b in zip(tree.levels, whole.levels, strict=True):
            close(a.log_prob_old, b.log_prob_old)
    other = grow([3, 4, 0], **kw)[1]
    close(other.leaves, torch.cat([whole.leaves[whole.prompt == p] for p in (2, 0, 1)]), atol=1e-4)


def test_noise_depends_on_the_slot_only():
    def draw(slots, level=2, key=(0, 5)):
        prompt = torch.arange(len(slots)).repeat_interleave(4)
        return t.tree_noise(key, slots, (2, 3))(level, prompt)
    a, b = draw([3, 8]), draw([8, 1, 3])
    assert torch.equal(a[:4], b[8:]) and torch.equal(a[4:], b[:4])
    others = (draw([3, 8], 3), draw([3, 8], key=(0, 6)), draw([3, 8], key=(1, 5)), a.flip(0))
    assert not any(torch.isclose(a, o).any() for o in others) and a.std() > 0.5


# ---- 5. Credit ------------------------------------------------------------------------------
# k = 3, d = 2, values of the nine leaves. Their means, and so the edges above: 2, 5, 1.
NINE = make_tree([0] * 3, [0] * 3 + [1] * 3 + [2] * 3)
LEAVES = tensor([1.0, 2, 3, 4, 5, 6, 0, 0, 3])
R, S, ABOVE = 1.5**0.5, 0.5**0.5, [x / 26**0.5 for x in (-2, 7, -5)]
BY_HAND = {
    "none": ([2, 5, 1], LEAVES),
    # minus the mean of the others: 2 - (5+1)/2, 5 - (2+1)/2, 1 - (2+5)/2; 1 - (2+3)/2, ...
    "center": ([-1, 3.5, -2.5], [-1.5, 0, 1.5, -1.5, 0, 1.5, -1.5, -1.5, 3]),
    # above: (-2, 7, -5) / 3, variance 26/9; (1, 2, 3): std sqrt(2/3); (0, 0, 3): mean 1, std sqrt 2
    "std": (ABOVE, [-R, 0, R, -R, 0, R, -S, -S, 2 * S]),
    # second depth: mean 8/3, mean square 100/9, variance 100/9 - 64/9 = 4
    "depth": (ABOVE, (LEAVES - 8 / 3) / 2)}


@pytest.mark.parametrize("mode", BY_HAND)
def test_credit_on_a_regular_tree(mode):
    got = t.normalize_siblings(NINE, t.backup(NINE, LEAVES), mode)
    for a, b in zip(got, BY_HAND[mode], strict=True):
        close(a, b)


def test_credit_on_an_irregular_tree():
    # A has leaves 4 and 0 (edges 0 and 2), B the only leaf 5: A = 2, B = 5
    tree, leaves = make_tree([0, 0], [0, 1, 0]), tensor([4.0, 5, 0])
    raw = t.backup(tree, leaves)
    close(raw[0], [2.0, 5])
    expected = {"center": ([-3, 3], [4, 5, -4]), "std": ([-1, 1], [1, 5, -1])}
    for mode, values in expected.items():  # the only child keeps its 5
        for a, b in zip(t.normalize_siblings(tree, raw, mode), values, strict=True):
            close(a, b)
    # softmax weights: log-probs 0 and log 3 give 1/4 and 3/4, so A = 4/4 + 0 = 1
    tree.levels[1].log_prob_old = tensor([0, -50.0, math.log(3)])
    close(t.backup(tree, leaves, "prob")[0], [1.0, 5])


def test_two_children_leave_signs_under_std():
    tree = make_tree([0, 0, 1, 1], prompt=(0, 1))
    got = t.normalize_siblings(tree, [tensor([0.1, 0.3, 9.0, -2.0])], "std")[0]
    close(got, [-1.0, 1, 1, -1])


@pytest.mark.parametrize("mode", ("center", "std", "none"))
def test_chains_are_flat_grpo(mode):
    tree = make_tree([0, 1, 2], [0, 1, 2], prompt=(0, 0, 0))
    for a in t.edge_advantages(tree, tensor([1.0, 2, 6]), config("flow-grpo", sibling_norm=mode)):
        close(a, tensor([-2.0, -1, 3]) / (14 / 3)**0.5)  # mean 3, variance (4 + 1 + 9) / 3


def test_groups_ties_several_rewards_and_clip():
    tree, rewards = make_tree([0, 0, 1, 1], prompt=(0, 0)), tensor([0.0, 1, 10, 12])
    edges = lambda tree, r, **kw: t.edge_advantages(tree, r, config(sibling_norm="none", **kw))[0]  # noqa: E731, E501
    # mean 5.75, variance (33.0625 + 22.5625 + 18.0625 + 39.0625) / 4
    close(edges(tree, rewards), tensor([-5.75, -4.75, 4.25, 6.25]) / 28.1875**0.5)
    close(edges(tree, rewards, group="root"), [-1.0, 1, -1, 1])
    close(t.leaf_advantages(tensor([1.0, 1, 2, 2]), tree.prompt), [-1.0, -1, 1, 1])
    two = tensor([[0.0, 1], [3000, 1000]])  # each +-1 on its own; the scale must not matter
    close(t.leaf_advantages(two, tensor([0, 0]), (0.8, 0.2)), [-0.6, 0.6])
    with pytest.raises(ValueError, match="2 or more"):
        t.leaf_advantages(rewards, tensor([0, 0, 0, 1]))
    tree, outlier = make_tree([0] * 30), torch.eye(30)[7]  # sqrt(29) = 5.39
    assert edges(tree, outlier).max() == 5 and edges(tree, -outlier, adv_clip=2.0).min() == -2


@pytest.mark.parametrize("value", (0.0, 0.1, 21.3, 100.1, -1e4))
@pytest.mark.parametrize("mode", BY_HAND)
def test_no_spread_gives_exactly_zero(value, mode):
    tree = make_tree([0, 0, 0, 1, 1, 1], [0, 1, 2] * 3 + [3, 4, 5], prompt=(0, 1))
    adv = t.edge_advantages(tree, torch.full((12,), value), config(sibling_norm=mode))
    assert all((a == 0).all() for a in adv)


@pytest.mark.parametrize("mode", ("mean", "prob"))
@pytest.mark.parametrize("seed", range(8))
def test_backup_against_recursion(mode, seed):
    g, parents, nodes = torch.Generator().manual_seed(seed), [], 3
    for _ in range(4):  # every node has a child, the others hang anywhere
        more = torch.cat([torch.arange(nodes), torch.randint(nodes, (seed + 1,), generator=g)])
        parents.append(more[torch.randperm(len(more), generator=g)].tolist())
        nodes = len(more)
    lp = [torch.randn(len(p), generator=g) for p in parents]
    leaves = torch.randn(nodes, generator=g)
    tree = make_tree(*parents, prompt=(0, 0, 1), log_prob=lp)

    def value(level, edge):
        if level == len(parents) - 1:
            return leaves[edge].item()
        below = [e for e, p in enumerate(parents[level + 1]) if p == edge]
        w = [math.exp(lp[level + 1][e]) if mode == "prob" else 1.0 for e in below]
        return sum(a * value(level + 1, e) for a, e in zip(w, below, strict=False)) / sum(w)
    for n, a in enumerate(t.backup(tree, leaves, mode)):
        close(a, [value(n, e) for e in range(len(parents[n]))])


def test_leave_one_out_is_unbiased():
    """Softmax bandit: the gradient of sum p r is p (r - p.r). All draws of k, by their chance."""
    p, r, k = tensor([0.5, 0.3, 0.2]), tensor([1.0, -2.0, 4.0]), 3
    draws = tensor(list(itertools.product(range(3), repeat=k)))  # (27, k)
    tree = make_tree(torch.arange(27).repeat_interleave(k).tolist(), prompt=range(27))
    score = torch.eye(3)[draws] - p  # grad log p of each draw, (27, k, 3)

    def gradient(adv):
        return (p[draws].prod(1)[:, None, None] * adv.view(27, k, 1) * score).sum((0, 1)) / k
    true = p * (r - p @ r)
    close(gradient(t.normalize_siblings(tree, [r[draws].flatten()], "center")[0]), true)
    close(gradient(r[draws] - r[draws].mean(1, keepdim=True)), true * (k - 1) / k)


# ---- 6. Clipped update ----------------------------------------------------------------------
@pytest.mark.parametrize("ratio, adv, loss, grad, side", [
    # clip .2; gradient by the ratio: -A, or 0 where the clip holds
    (1.0, 2.0, -2.0, -2.0, ""), (1.1, 2.0, -2.2, -2.0, ""), (1.5, 2.0, -2.4, 0.0, "high"),
    (0.5, 2.0, -1.0, -2.0, ""), (0.5, -2.0, 1.6, 0.0, "low"), (1.5, -2.0, 3.0, 2.0, ""),
    (0.9, -2.0, 1.8, 2.0, ""), (1.5, 0.0, 0.0, 0.0, "")])
def test_surrogate_by_hand(ratio, adv, loss, grad, side):
    lp = tensor([math.log(ratio)], requires_grad=True)
    got, stats = t.clipped_surrogate(lp, torch.zeros(1), tensor([adv]), 0.2)
    got.sum().backward()
    close(torch.cat([got.detach(), lp.grad, stats["ratio"]]), [loss, grad * ratio, ratio])
    assert [stats["clip_low"].item(), stats["clip_high"].item()] == [side == "low", side == "high"]


def test_clip_range_by_hand():
    width = lambda **kw: t.clip_range(config(**kw), tensor([-2.0, 0, 2]), 16)  # noqa: E731
    # sigmoid(2) = .880797: .1 + .4 x (.119203, .5, .880797), over sqrt(16)
    close(width(clip_min=0.1, clip_max=0.5), tensor([0.147681, 0.3, 0.452319]) / 4)
    close(width(clip=0.3), 0.075)
    close(width(clip_min=0.3, clip_max=0.3), [0.075] * 3)


def test_edge_weights_by_hand():
    # leaves under the edges of level 1: 2, 1, 1, 1; edges 0, 2, 3 hang under A, edge 1 under B
    tree = make_tree([0, 0], [0, 1, 0, 0], [0, 0, 1, 2, 3], std=(0.2, 0.6, 0.4))
    weights = lambda **kw: torch.cat(t.edge_weights(tree, config(**kw)))  # noqa: E731
    close(weights() * 11, torch.ones(11))
    close(weights(loss_reduce="sum"), torch.ones(11))
    close(weights(loss_reduce="layer") * 15, [4.0, 1, 2, 1, 1, 1] + [1.0] * 5)
    close(weights(step_weight="std") * 4.8, [0.2] * 2 + [0.6] * 4 + [0.4] * 5)
    tree.levels[0].step = dataclasses.replace(tree.levels[0].step, train=False)
    close(weights(step_weight="std") * 4.4, [0.0] * 2 + [0.6] * 4 + [0.4] * 5)


class Line(t.Policy):
    """Velocity w x with one parameter, for gradients by hand: sigma 1, .6, .3, 0."""

    kind, guided, shape, device = "flow", False, (1, 1, 1), torch.device("cpu")

    def __init__(self, cfg, w=0.5):
        self.cfg, self.grid = cfg, tensor([1.0, 0.6, 0.3, 0.0])
        self.trainable, self.initial = [torch.nn.Parameter(tensor(w))], [tensor(0.5)]

    def denoise(self, x, i, cond):
        return self.trainable[0] * x


def gradients(policy, tree, adv, leaf, cfg, cond=None):
    """Gradients and statistics of one update whose optimiser does not move."""
    cfg = dataclasses.replace(cfg, max_grad_norm=1e9, inner_epochs=1)
    still = torch.optim.SGD(policy.trainable, 0.0)
    log = t.update(policy, tree, adv, leaf, cond or {}, cfg, still)
    return [p.grad.clone() for p in policy.trainable], log[0]


def test_layer_tuning_by_hand():
    tree = make_tree([0, 0], [0, 0, 1, 1], x=(tensor([1.0]), tensor([2.0, -3.0])))
    # (1, 2, 4, 4): mean 2.75, variance 1.6875; the first best leaf is 2, under node 1
    leaf, lead = t.leaf_advantages(tensor([1.0, 2, 4, 4]), tree.prompt), 1.25 / 1.6875**0.5
    target, weight = zip(*t.layer_tuning(tree, leaf), strict=False)
    assert [z.tolist() for z in target] == [[0], [1, 1]]
    close(torch.cat(weight), [0, lead / 2, 0])  # 1 node imitates, 2 layers are trained
    tree.levels[1].pred = tensor([9.0, 7.0]).view(2, 1, 1, 1)
    zero, cfg = [torch.zeros(2), torch.zeros(4)], config(sft=0.1)
    (grad,), _ = gradients(Line(cfg), tree, zero, leaf, cfg)
    # lambda x lead x d/dw (w 2 - 7)^2, over 1 node that imitates and 2 trained layers
    close(grad, 0.1 * lead * 2 * (0.5 * 2 - 7) * 2 / 2)
    assert gradients(Line(cfg), tree, zero, leaf * 0, cfg)[0][0] == 0
    # among ties under different nodes, too, the first leads
    assert t.layer_tuning(tree, tensor([0.0, 1, 1, 0]))[1][0].tolist() == [0, 0]


def test_kl_by_hand():
    cfg, tree, zero = config(kl=0.2), make_tree([0, 0], x=(tensor([2.0]),)), [torch.zeros(2)]
    tree.levels[0].step = t.Step(1, 2, 2, 0.7, True)
    (grad,), log = gradients(Line(cfg), tree, zero, torch.zeros(2), cfg)
    assert log["kl"] == 0 and grad == 0  # the reference is the start
    policy = Line(cfg, w=0.8)
    (grad,), log = gradients(policy, tree, zero, torch.zeros(2), cfg)
    # mean = ... + v c, c = (1 + s^2 (1 - .6) / 1.2) (-.3), s^2 = .49 x 1.5, std^2 = .3 s^2
    c, var = (1 + 0.735 * 0.4 / 1.2) * -0.3, 0.3 * 0.735
    close(log["kl"], (0.3 * 2 * c)**2 / (2 * var))
    close(grad, 0.2 * 0.3 * (2 * c)**2 / var)
    assert policy.trainable[0] == tensor(0.8)


def scored(**flags):
    run, tree = grow((0, 1, 2), branch=(2,), **flags)
    rewards = torch.rand(len(tree.leaves), generator=torch.Generator().manual_seed(0))
    leaf = t.leaf_advantages(rewards, tree.prompt)
    for p in run.policy.trainable if run.cfg.kl else []:
        p.data.mul_(1.001)  # away from the start, where the gradient of the KL is zero
    cond = run.policy.encode([t.CAPTIONS[3 * s] for s in range(3)])
    return run, tree, t.edge_advantages(tree, rewards, run.cfg), leaf, cond


def close_gradients(a, b):
    largest = max(g.abs().max().item() for g in b)
    assert largest > 1e-4
    for x, y in zip(a, b, strict=True):
        close(x, y, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("flags", ({}, {"loss_reduce": "layer"}, {"step_weight": "std"},
                                   {"loss_reduce": "sum"}, {"kl": 0.5}, {"sft": 1.0},
                                   {"model": "tiny-ddpm"}, {"train_fraction": 0.4}), ids=str)
def test_accumulation_equals_the_full_batch(flags):
    run, tree, adv, leaf, cond = scored(**flags)
    full, *parts = [gradients(run.policy, tree, adv, leaf,
                              dataclasses.replace(run.cfg, micro_batch=m), cond)[0]
                    for m in (128, 5, 1)]
    for part in parts:
        close_gradients(part, full)


def test_reductions_and_level_order():
    run, tree, adv, leaf, cond = scored()
    edges, total = [gradients(run.policy, tree, adv, leaf, dataclasses.replace(
        run.cfg, loss_reduce=r), cond)[0] for r in ("edges", "sum")]
    close_gradients([14 * g for g in edges], total)  # 3 prompts, 2 + 4 + 8 edges each
    weights, tuning = t.edge_weights(tree, run.cfg), t.layer_tuning(tree, leaf)
    run.optimizer.zero_grad()
    back = dataclasses.replace(tree, levels=tree.levels[::-1])
    t.accumulate_gradients(run.policy, back, adv[::-1], cond, run.cfg, weights[::-1], tuning[::-1])
    close_gradients([p.grad / t.LOSS_SCALE for p in run.policy.trainable], edges)


def test_extras_switched_off_leave_the_plain_tree():
    def after_one_iteration(**kw):
        run = t.Run(config(window_mode="sliding", branch=(2,), depth=4, inner_epochs=2, **kw))
        run.train_iteration()
        return [p.detach() for p in run.policy.trainable]
    plain = after_one_iteration(clip=0.02)
    off = {"method": "dynamic-treerpo", "sft": 0.0, "noise_growth": 0.0, "clip_min": 0.02,
           "clip_max": 0.02}
    assert same(plain, after_one_iteration(**off))
    for on in ({"sft": 0.1}, {"noise_growth": 0.5}, {"clip_min": 1e-5, "clip_max": 1e-4}):
        assert not same(plain, after_one_iteration(**off | on))


def test_weight_average_by_hand():
    run = t.Run(config(ema=0.9))
    before = [p.detach().clone() for p in run.policy.trainable]
    run.train_iteration()
    for e, a, b in zip(run.ema, before, run.policy.trainable, strict=True):
        close(e, 0.9 * a + 0.1 * b.data)
    assert not same(run.ema, before) and not same(run.ema, [p.data for p in run.policy.trainable])
    with run.averaged():
        assert same([p.data for p in run.policy.trainable], run.ema)


@pytest.mark.parametrize("name, values", (("constant", (1, 1, 1, 1)), ("linear", (1, .75, .5, .25)),
                                          ("cosine", (1, 0.853553, 0.5, 0.146447))))
def test_learning_rate_schedules(name, values):
    t.train(config(lr_schedule=name, iterations=4, branch=(2,), depth=1, eval_every=4, out="a"))
    close([log["lr"] * 1e3 for log in read_log("a") if "lr" in log], [float(v) for v in values])


# ---- 7. Many processes ----------------------------------------------------------------------
def one_rank(rank, folder, cfg):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/sync", rank=rank,
                                         world_size=2, timeout=timedelta(seconds=60))
    out = {"iteration": one_iteration(cfg), "errors": []}
    bad, denoise = math.nan if rank == 1 else 1.0, t.TinyPolicy.denoise
    for phase in ("rollout", "evaluation", "update"):  # one rank meets a NaN
        if phase == "update":
            t.TinyPolicy.denoise = lambda self, x, i, cond: \
                denoise(self, x, i, cond) * (bad if torch.is_grad_enabled() else 1)
        factor = 1.0 if phase == "update" else bad
        HOOK["reward"] = lambda x, p, factor=factor: x.mean((1, 2, 3)) * factor
        run = t.Run(cfg)
        try:
            run.measure() if phase == "evaluation" else run.train_iteration()
        except t.NumericalError as e:
            out["errors"].append(str(e))
    try:
        t.Run(dataclasses.replace(cfg, prompts_per_iteration=1))
    except t.UsageError as e:
        out["few"] = str(e)
    torch.save(out, f"{folder}/{rank}.pt")


def one_iteration(cfg):
    run = t.Run(cfg)
    score = run.measure()["eval"]
    run.train_iteration()
    return [p.grad for p in run.policy.trainable], score


def test_two_processes_equal_one(tmp_path):  # two prompts for one rank, one for the other
    cfg = config(branch=(2,), sft=0.1, kl=0.1, prompts_per_iteration=3, eval_images=5,
                 max_grad_norm=1e9, reward=(f"{__name__}:hooked",), out=str(tmp_path / "run"))
    children = torch.multiprocessing.spawn(one_rank, (str(tmp_path), cfg), 2, join=False)
    grads, score = one_iteration(cfg)
    end = time.monotonic() + 90
    while not children.join(timeout=1):
        if time.monotonic() > end:
            [p.kill() for p in children.processes]
            pytest.fail("the processes wait for each other")
    ranks = [torch.load(tmp_path / f"{r}.pt") for r in range(2)]
    largest = max(g.abs().max().item() for g in grads)
    assert same(ranks[0]["iteration"][0], ranks[1]["iteration"][0]) and largest > 1e-4
    for word, error in zip(("nan", "nan", "loss"), ranks[1]["errors"], strict=True):
        assert word in error
    assert ["another process" in e for e in ranks[0]["errors"]] == [True] * 3
    for out in ranks:
        close(out["iteration"][1], score)
        for a, b in zip(out["iteration"][0], grads, strict=True):
            close(a, b, rtol=0, atol=1e-6 * max(1, largest))
        assert "--prompts-per-iteration 1" in out["few"] and ">= 2" in out["few"]


# ---- 8. Models: the tiny world --------------------------------------------------------------
def test_captions_and_drawings():
    assert len(set(t.CAPTIONS)) == 16 == len(t.caption_words(t.CAPTIONS).unique(dim=0))
    for c in t.CAPTIONS:
        ink = (t.draw_caption(c) < 0.96).any(1)  # (4, 16, 16)
        assert len(ink) == len(t.PLACES) and len(set(ink.sum((1, 2)).tolist())) == 1  # none cut off
        assert not ink[:, (0, -1)].any() and not ink[:, :, (0, -1)].any() and ink.any()


def test_tiny_ddpm_has_the_grid_of_sd15():
    x = torch.zeros(1, 3, 16, 16)
    policy = t.TinyPolicy(config(model="tiny-ddpm"), torch.device("cpu"))
    assert (policy.times * 1000).round().tolist() == [901 - 100 * i for i in range(10)]
    stds = [policy.step(x, x, i, i + 1, 1.0)[1].item() for i in range(10)]
    close(stds, [.776, .727, .668, .601, .528, .448, .362, .261, .041, .021], atol=6e-4, rtol=0)


@each_model
def test_base_is_trained_once(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(t.BASE, "steps", 6)
    monkeypatch.setattr(t, "pretrain", PRETRAIN)
    state, first = torch.get_rng_state(), t.tiny_base(model).state_dict()
    assert torch.equal(state, torch.get_rng_state())  # leaves the caller's generator alone
    monkeypatch.setattr(t, "pretrain", None)  # a second training would fail
    assert same(first.values(), t.tiny_base(model).state_dict().values())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(t, "pretrain", PRETRAIN)
    assert same(first.values(), t.tiny_base(model).state_dict().values())  # seeded
    assert any(first["blocks.0.ada.bias"] != 0)


def test_v_steps_are_those_of_the_implied_eps():
    v_model, eps_model = Line(config()), Line(config())
    v_model.kind, eps_model.kind = "v", "eps"
    v_model.grid = eps_model.grid = tensor([0.1, 0.4, 0.7, 1.0])
    x0, n = torch.randn(2, 3, 1, 1, 1).unbind()
    x, v = 0.4**0.5 * x0 + 0.6**0.5 * n, 0.4**0.5 * n - 0.6**0.5 * x0
    close(v_model.step(x, v, 1, 2, 0.5)[0], eps_model.step(x, n, 1, 2, 0.5)[0])
    close(v_model.denoised(x, v, 1), x0)
    close(eps_model.denoised(x, n, 1), x0)


# ---- 9. Rewards -----------------------------------------------------------------------------
def test_shapes_reward_knows_its_drawings():
    reward = t.shapes_reward("cpu")
    for c, other in itertools.product(t.CAPTIONS, repeat=2):
        got = reward(t.draw_caption(c), [other] * 4)
        assert (got == 1).all() if c == other else (got < 0.95).all(), (c, other, got)


def test_user_reward_and_weights():
    Path("my_rewards.py").write_text("def bright(images, prompts): return images.mean((1, 2, 3))")
    run = t.Run(config(reward=("shapes:0.8", "my_rewards:bright:0.2"), out="run"))
    _, images, rewards = run.grow(0, [0], [t.CAPTIONS[5]])
    close(rewards[0], t.shapes_reward("cpu")(images, [t.CAPTIONS[5]] * 27))
    close(rewards[1], images.mean((1, 2, 3)))
    assert list(run.weights) == pytest.approx([0.8, 0.2])
    assert t.parse_reward("a.b:f") == ("a.b:f", 1.0) and t.parse_reward("shapes") == ("shapes", 1.0)


# ---- 10, 11. Loop ---------------------------------------------------------------------------
ARGS = ("--prompts-per-iteration 2 --branch 2 --eval-every 2 --eval-images 4 --ema 0.9 "
        f"--inner-epochs 2 --lr 1e-3 --reward {__name__}:hooked").split()


def cli(*argv):
    return t.main([*ARGS, *map(str, argv)])


def read_log(folder):
    lines = [json.loads(x) for x in (Path(folder) / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if not k.startswith(("seconds", "memory"))} for x in lines]


def checkpoint(folder):
    return torch.load(Path(folder) / "last.pt", weights_only=True)


def assert_same_run(a, b):
    assert read_log(a) == read_log(b)
    a, b = checkpoint(a), checkpoint(b)
    assert a.keys() == b.keys() and a["progress"] == b["progress"]
    assert same(a["weights"], b["weights"]) and same(a["ema"], b["ema"])
    adam = [[v for s in x["optimizer"]["state"].values() for v in s.values()] for x in (a, b)]
    assert same(*adam) and len(adam[0]) == 3 * len(a["weights"])


@each_model
@each_method
def test_presets_train_and_count(method, model):
    run = t.Run(cfg := config(method, model=model, out="run"))
    before = [p.detach().clone() for p in run.policy.trainable]
    for i in range(2):
        run.iteration, steps = i, t.schedule(cfg, i)
        seen, log = run.policy.evaluations, run.train_iteration()
        sample, train = t.nfe(steps, cfg.roots, cfg.inner_epochs, cfg.kl > 0)
        assert log["evaluations_sample"] == 2 * sample
        assert run.policy.evaluations - seen == 2 * (sample + train)
        assert log["ratio_max/0"] == 0 and 0 < log["grad_norm/0"] < math.inf
        assert log["window"] == next(s.i for s in steps if s.noise)
    assert not same(before, [p.data for p in run.policy.trainable])


@each_model
def test_resumed_equals_uninterrupted(model, capsys):
    assert cli("--model", model, "--out", "a", "--iterations", 4) == 0
    assert cli("--model", model, "--out", "b", "--iterations", 2) == 0
    with open("b/log.jsonl", "a") as f:  # a process killed after its checkpoint
        f.write('{"iteration": 3, "reward": 9}\n{"iterat')
    assert t.main(["--resume", "b", "--iterations", "4", "--micro-batch", "128"]) == 0
    assert_same_run("a", "b")
    assert [x["iteration"] for x in read_log("b")] == [0, 1, 2, 3, 4]
    capsys.readouterr()
    assert t.main(["--resume", "b", "--lr", "5"]) == 2
    one_error(capsys, "--lr 5.0", "0.001", "iterations")


@pytest.mark.parametrize("call", (1, 2, 3))  # in the first evaluation; in iterations 1 and 2
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_signal_leaves_a_checkpoint(call, number):
    calls, plain = [], t.shapes_reward("cpu")

    def reward(images, prompts):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return plain(images, prompts)
    HOOK["reward"] = reward
    cli("--out", "b", "--iterations", 3)
    assert checkpoint("b")["progress"]["iteration"] == call - 1
    HOOK.clear()
    assert t.main(["--resume", "b"]) == 0 and cli("--out", "a", "--iterations", 3) == 0
    assert_same_run("a", "b")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_run_folder_is_kept_and_locked(capsys):
    assert cli("--out", "a", "--iterations", 1) == 0
    before = Path("a/log.jsonl").read_bytes() + Path("a/config.json").read_bytes()
    capsys.readouterr()
    assert cli("--out", "a", "--iterations", 1, "--seed", 1) == 2
    one_error(capsys, "--resume a", "--overwrite")
    with open("a/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli("--out", "a", "--iterations", 1, "--seed", 1, "--overwrite") == 2
    one_error(capsys, "a", "run")
    assert before == Path("a/log.jsonl").read_bytes() + Path("a/config.json").read_bytes()
    assert cli("--out", "a", "--iterations", 1, "--seed", 1, "--overwrite") == 0
    assert json.loads(Path("a/config.json").read_text())["seed"] == 1 and len(read_log("a")) == 2


@pytest.mark.parametrize("content", (None, b"", b"PK not a checkpoint"))
def test_resume_without_a_checkpoint_is_refused(content, capsys):
    assert cli("--out", "a", "--iterations", 1) == 0
    capsys.readouterr()
    Path("a/last.pt").unlink() if content is None else Path("a/last.pt").write_bytes(content)
    assert t.main(["--resume", "a", "--iterations", "2"]) == 2
    one_error(capsys, "last.pt")


def test_bad_rewards_skip_their_updates_only(capfd):
    calls, plain = [], t.shapes_reward("cpu")

    def reward(images, prompts):  # call 1 evaluates; iterations 1, 2 and 4 are bad
        calls.append(1)
        return plain(images, prompts) / (len(calls) not in (2, 3, 5))
    HOOK["reward"] = reward
    assert cli("--out", "a", "--iterations", 5, "--eval-every", 9, "--seed", 7) == 0
    skipped = [x.get("skipped") for x in read_log("a")]
    assert [bool(s) for s in skipped] == [False, True, True, False, True, False]
    assert any(c in skipped[1] for c in t.CAPTIONS) and "seed 7" in skipped[1]
    assert skipped[1] in capfd.readouterr().err


@pytest.mark.parametrize("where, word", (("reward", "nan"), ("denoiser", "step 4"),
                                         ("gradient", "gradient")))
def test_three_bad_iterations_stop_with_state_saved(where, word, monkeypatch, capfd):
    calls, plain, denoise = [], t.shapes_reward("cpu"), t.TinyPolicy.denoise

    def reward(images, prompts):
        calls.append(1)
        return plain(images, prompts) * (math.nan if where == "reward" and len(calls) > 1 else 1)

    def broken(self, x, i, cond):
        out = denoise(self, x, i, cond)
        if where == "gradient" and out.requires_grad:
            out.register_hook(lambda g: g * math.inf)
        return out * (math.nan if where == "denoiser" and calls and i == 4 else 1)
    HOOK["reward"] = reward
    monkeypatch.setattr(t.TinyPolicy, "denoise", broken)
    assert cli("--out", "a", "--iterations", 9, "--save-every", 9) == 1
    assert "in a row" in capfd.readouterr().err
    log, state = read_log("a"), checkpoint("a")
    assert [bool(x.get("skipped")) for x in log] == [False] + [True] * 3
    assert word in log[1]["skipped"] and state["progress"]["iteration"] == 3
    assert same(state["weights"], [p.data for p in t.tiny_base("tiny").parameters()])


@pytest.mark.parametrize("bad, message", (
    (lambda x, p: 1 / 0, "ZeroDivisionError"), (lambda x, p: torch.zeros(3, 2), "(3, 2)"),
    (lambda x, p: torch.zeros(len(x), dtype=torch.long), "int64"), (lambda x, p: [0.0], "list")))
@pytest.mark.parametrize("call", (3, 4))  # in iteration 2, and in the evaluation after it
def test_faulty_reward_function(bad, message, call, capfd):
    calls, plain = [], t.shapes_reward("cpu")
    HOOK["reward"] = lambda x, p: (calls.append(1), (bad if len(calls) == call else plain)(x, p))[1]
    assert cli("--out", "a", "--iterations", 4, "--save-every", 9) == 1
    err = capfd.readouterr().err
    assert message in err and f"{__name__}:hooked" in err and "Traceback" not in err
    assert checkpoint("a")["progress"]["iteration"] == call - 2


def test_prompts_are_drawn_in_epochs():
    cfg, names = config(prompts_per_iteration=3), list("abcdefg")
    drawn = [p for i in range(7) for p in t.draw_prompts(cfg, names, i)[1]]
    epochs = [drawn[n:n + 7] for n in (0, 7, 14)]
    assert all(sorted(e) == names for e in epochs) and epochs[0] != epochs[1]
    assert t.draw_prompts(cfg, ["x"], 0) == ([0, 1, 2], ["x"] * 3)
