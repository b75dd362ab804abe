"""Tests of treegrpo.py and evaluate.py, in the order of their sections: pytest, pytest -m slow"""

import dataclasses
import fcntl
import functools
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import types
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import tensor

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = f"{tempfile.gettempdir()}/no-hub"

import evaluate as ev
import treegrpo as t

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells ignore it
TEMP = tempfile.TemporaryDirectory()
t.BASE.update(width=32, blocks=2, heads=2)  # the same network, smaller
FIELDS = {f.name: f for f in dataclasses.fields(t.Config)}
CPU, MODELS, SOURCE = torch.device("cpu"), ("tiny", "tiny-ddpm"), Path(t.__file__)
PRETRAIN, DRAW_RUN = t.pretrain, ev.draw_run
TIME = ("seconds", "memory")  # keys of the log that differ between equal runs
HOOK = {}  # what the reward `hooked` does: the tests set it
each_model = pytest.mark.parametrize("model", MODELS)
each_method = pytest.mark.parametrize("method", t.PRESETS)
each_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.float64))

def hooked(images, prompts):
    return HOOK.get("reward", t.shapes_reward("cpu"))(images, prompts)

def open_gates(kind, net):
    torch.manual_seed(len(kind))
    for block in net.blocks:
        torch.nn.init.normal_(block.ada.weight, std=0.2)

@pytest.fixture(scope="session", autouse=True)
def random_base(tmp_path_factory):
    """Random weights in place of the trained base, in a cache of our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(t, "pretrain", open_gates)
        for kind in MODELS:
            t.tiny_base(kind)
        patch.setattr(t, "pretrain", None)  # cached from here on
        yield

@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ev, "draw_run", lambda run: None)  # takes longer than a short run
    HOOK.clear()
    torch.manual_seed(0)

def config(method="treegrpo", **flags):
    """A preset with few roots, children and prompts."""
    preset = t.PRESETS[method]
    small = {"roots": min(preset.get("roots", 1), 2), "prompts_per_iteration": 2, "iterations": 2,
             "branch": tuple(min(k, 3) for k in preset.get("branch", (3,))), "eval_images": 4,
             "eval_every": 2, "lr": 1e-3, "anchor": 0.0}
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
    leaves, noise = (torch.zeros(len(rows), 1, 1, 2) for rows in (of, prompt))
    return t.Tree(levels, leaves, of, root, noise)

def close(a, b, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=rtol, atol=atol,
                               check_dtype=False)

def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

def values(parameters):
    return [p.detach().clone() for p in parameters]

def one_line(text, *fragments):
    assert text.strip().count("\n") == 0 and "Traceback" not in text, text
    assert all(str(f) in text for f in fragments), (text, fragments)

def one_error(capsys, *fragments):
    one_line(capsys.readouterr().err, *fragments)

# ==== treegrpo.py: 1. Configuration and command line ===========================================
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
    assert t.parse(["--reward", "hpsv2:0.8", "clip:0.2"]).reward == ("hpsv2:0.8", "clip:0.2")

@pytest.mark.parametrize("model", t.FAMILIES)
@each_method
def test_presets_resolve_on_every_model(method, model, capsys):
    argv = ["--method", method, "--model", model, "--plan", "--guidance", "2"]
    assert t.main(argv) == 0 and model in capsys.readouterr().out
    assert all(getattr(t.parse(argv), k) == v for k, v in t.PRESETS[method].items()
               if k != "noise_level" or not t.is_ddim(model))

def test_defaults_follow_the_model(capsys):
    sd, sd3 = t.resolve({"model": "sd15"}), t.resolve({"model": "sd3"})
    assert (sd.guidance, sd.noise_level, sd.lr, sd.resolution) == (5.0, 1.0, 3e-4, 512)
    assert (sd3.guidance, sd3.noise_level, sd3.lr) == (4.5, 0.7, 3e-4)
    assert t.resolve({"model": "flux", "full": True}).lr == 1e-5
    assert t.resolve({"model": "flux", "full": True, "lr": 2e-5}).lr == 2e-5
    grown = t.resolve({"model": "sd15", "method": "dynamic-treerpo"})
    close(max(s.noise for s in t.schedule(grown, 0)), 1.0)
    old = "runwayml/stable-diffusion-v1-5"
    assert t.resolve({"model": old}) == sd
    one_error(capsys, f"{old} has left the hub; using sd15")

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
        rows += [("ten", "must be a")] if kind in (int, float) else []
        rows += [("nan", "must be"), ("inf", "finite")] if kind is float else []
        flag, gap = "--" + name.replace("_", "-"), "=" if kind is bool else " "
        for value, allowed in rows + [("maybe", "maybe")] * (kind is bool):
            yield f"{flag}{gap}{value}", flag, str(value), allowed

BAD = [  # flags, fragments of the message
    ("--model tinny", "tinny", "did you mean tiny?", "tiny-ddpm"),
    ("--model sd51", "did you mean sd15?"),
    ("--method tree-grpo", "tree-grpo", "did you mean treegrpo?", "dancegrpo"),
    ("--reward shaeps", "shaeps", "did you mean shapes?", "MODULE:FUNCTION"),
    ("--reward hpsv3", "hpsv3", "did you mean hpsv2?"), ("--reward clip:inf", "clip:inf"),
    ("--reward shapes:nan", "shapes:nan"), ("--reward shapes shapes:2", "shapes", "once"),
    ("--reward no_such_module:f", "no_such_module"), ("--reward math:no_such", "no_such"),
    ("--reward math:pi", "math:pi", "not a function"),
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
    ("--reward-weights hpsv2=/no/folder", "/no/folder"), ("--reward-weights clop=/", "clip"),
    ("--reward-weights /", "NAME=FOLDER"), *out_of_range()]

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
    ("a.jsonl", f'{{"prompt": "{C}"}}\n{{"prompt": "  "}}\n', ("empty prompt",)),
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

@pytest.mark.parametrize("argv, code", ((["--help"], 0), (["--steps", "1"], 2)))
def test_program_alone_needs_only_torch(argv, code):
    block = ("import sys, runpy\nclass Block:\n def find_spec(self, name, *_):\n"
             "  if name.split('.')[0] in ('diffusers', 'transformers', 'peft', 'tqdm', 'PIL',"
             " 'matplotlib', 'safetensors', 'evaluate'): raise ImportError(name)\n"
             f"sys.path.insert(0, {str(SOURCE.parent)!r})\n"
             f"sys.meta_path.insert(0, Block())\nsys.argv = ['treegrpo.py', *{argv}]\n"
             f"runpy.run_path({str(SOURCE)!r}, run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60)
    text = " ".join(done.stdout.split())
    assert done.returncode == code
    if code:
        assert not text and done.stderr.count("\n") == 1
        one_line(done.stderr, "--steps 1", ">= 2")
    else:
        assert not done.stderr and all(f.metadata["help"] in text for f in FIELDS.values())

def test_out_of_memory_names_the_flags(monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(t, "train", full)
    assert t.main(["--micro-batch", "64"]) == 1
    one_error(capsys, "--micro-batch below 64", "--grad-checkpointing", "--resolution", "bf16")

# ==== 2. Schedule ===============================================================================
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
        assert all(a.j == b.i and a.i < a.j for a, b in itertools.pairwise(steps))
        assert all(s.noise or (s.children == 1 and not s.train) for s in steps)

def test_nfe_by_hand():  # start 0: 1 + 3 + 9, then 27 leaves for 7 steps = 202
    costs = [t.nfe(fixed(i)) for i in range(7)]
    assert costs == [(n, 13) for n in (202, 176, 150, 124, 98, 72, 46)]
    dance = t.parse(["--method", "dancegrpo", "--branch", "27", "1", "--train-fraction", "1"])
    assert t.nfe(t.schedule(dance, 0)) == (244, 217)
    assert t.nfe(fixed(), roots=2, inner_epochs=3, kl=True) == (404, 2 * 13 * 3 * 2)
    assert t.nfe(fixed(), inner_epochs=3, anchor=True) == (202, (13 + 1) * 3 + 1)

# ==== 3. Samplers ===============================================================================
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
    for now, then in itertools.pairwise(grid):
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

# ==== 4. Tree and rollout =======================================================================
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

@each_model
def test_rollout_does_not_depend_on_batching_or_order(model):
    slots, kw = [4, 0, 3], {"model": model, "noise_level": 0.7}
    whole = grow(slots, **kw)[1]
    for micro in (1, 5):
        tree = grow(slots, micro_batch=micro, **kw)[1]
        close(tree.leaves, whole.leaves, atol=1e-4)
        for a, b in zip(tree.levels, whole.levels):
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

# ==== 5. Credit =================================================================================
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
    for mode, by_hand in expected.items():  # the only child keeps its 5
        for a, b in zip(t.normalize_siblings(tree, raw, mode), by_hand, strict=True):
            close(a, b)
    # softmax weights: log-probs 0 and log 3 give 1/4 and 3/4, so A = 4/4 + 0 = 1
    tree.levels[1].log_prob_old = tensor([0, -50.0, math.log(3)])
    close(t.backup(tree, leaves, "prob")[0], [1.0, 5])
    # two children keep their signs only
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
    def edges(tree, rewards, **flags):
        return t.edge_advantages(tree, rewards, config(sibling_norm="none", **flags))[0]
    # mean 5.75, variance (33.0625 + 22.5625 + 18.0625 + 39.0625) / 4
    close(edges(tree, rewards), tensor([-5.75, -4.75, 4.25, 6.25]) / 28.1875**0.5)
    close(edges(tree, rewards, group="root"), [-1.0, 1, -1, 1])
    close(t.leaf_advantages(tensor([1.0, 1, 2, 2]), tree.prompt), [-1.0, -1, 1, 1])
    alike = t.leaf_advantages(tensor([1.0, 3, 5, 5]), tensor([0, 0, 1, 1]))
    close(alike, [-1.0, 1, 0, 0])  # std 1, and no spread
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
        return sum(a * value(level + 1, e) for a, e in zip(w, below)) / sum(w)
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

# ==== 6. Clipped update =========================================================================
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

    kind, guided, shape, device = "flow", False, (1, 1, 1), CPU

    def __init__(self, cfg, w=0.5):
        self.cfg, self.grid = cfg, tensor([1.0, 0.6, 0.3, 0.0])
        self.trainable, self.initial = [torch.nn.Parameter(tensor(w))], [tensor(0.5)]

    def denoise(self, x, i, cond):
        return self.trainable[0] * x

def gradients(policy, tree, adv, leaf, cfg, cond=None, iteration=0):
    """Gradients and statistics of one update whose optimiser does not move."""
    cfg = dataclasses.replace(cfg, max_grad_norm=1e9, inner_epochs=1)
    still = torch.optim.SGD(policy.trainable, 0.0)
    log = t.update(policy, tree, adv, leaf, cond or {}, cfg, still, iteration)
    return [p.grad.clone() for p in policy.trainable], log[0]

def test_layer_tuning_by_hand():
    tree = make_tree([0, 0], [0, 0, 1, 1], x=(tensor([1.0]), tensor([2.0, -3.0])))
    # (1, 2, 4, 4): mean 2.75, variance 1.6875; the first best leaf is 2, under node 1
    leaf, lead = t.leaf_advantages(tensor([1.0, 2, 4, 4]), tree.prompt), 1.25 / 1.6875**0.5
    target, weight = zip(*t.layer_tuning(tree, leaf))
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

def test_anchor_by_hand():
    cfg, tree = config(anchor=0.2, steps=3, depth=1), make_tree([0, 0, 1, 1], prompt=(0, 1))
    tree = dataclasses.replace(tree, leaves=tensor([2.0, 9, -1, 9]).view(4, 1, 1, 1),
                               noise=tensor([1.0, 3]).view(2, 1, 1, 1))
    zero, seen = [torch.zeros(4)], set()
    assert gradients(Line(cfg), tree, zero, zero[0], cfg)[0][0] == 0  # the reference is the start
    for iteration in range(8):
        policy = Line(cfg, w=0.8)
        i = t.anchor_level(policy, tree, {}, cfg, iteration).step.i
        (grad,), _ = gradients(policy, tree, zero, zero[0], cfg, iteration=iteration)
        sigma, seen = {1: 0.6, 2: 0.3}[i], seen | {i}
        x = [(1 - sigma) * 2 + sigma, -(1 - sigma) + 3 * sigma]  # the first leaf of each prompt
        close(grad, 0.2 * (x[0]**2 + x[1]**2) / 2 * 2 * (0.8 - 0.5))
        assert policy.trainable[0] == tensor(0.8)
    assert seen == {1, 2}  # all grid points after the window

def test_anchor_leads_back_to_the_reference():
    run, tree, adv, leaf, cond = scored(anchor=1.0)
    for p in run.policy.trainable:
        p.data.mul_(1.2)
    level, gaps = t.anchor_level(run.policy, tree, cond, run.cfg, 0), []
    for _ in range(30):
        with torch.no_grad():
            now = t.transition(run.policy, level.x, level.prompt, level.step, cond)[0]
        gaps.append((now - level.pred).square().mean())
        t.update(run.policy, tree, [0 * a for a in adv], leaf, cond, run.cfg, run.optimizer)
    assert gaps[-1] < gaps[0] / 2

def scored(**flags):
    run, tree = grow((0, 1, 2), branch=(2,), **flags)
    rewards = torch.rand(len(tree.leaves), generator=torch.Generator().manual_seed(0))
    leaf = t.leaf_advantages(rewards, tree.prompt)
    for p in run.policy.trainable if run.cfg.kl or run.cfg.anchor else []:
        p.data.mul_(1.001)  # away from the start, where the gradient of these is zero
    cond = run.policy.encode([t.CAPTIONS[3 * s] for s in range(3)])
    return run, tree, t.edge_advantages(tree, rewards, run.cfg), leaf, cond

def close_gradients(a, b):
    largest = max(g.abs().max().item() for g in b)
    assert largest > 1e-4
    for x, y in zip(a, b, strict=True):
        close(x, y, rtol=1e-3, atol=1e-5 * largest)

@pytest.mark.parametrize("flags", ({}, {"loss_reduce": "layer"}, {"step_weight": "std"},
                                   {"loss_reduce": "sum"}, {"kl": 0.5}, {"sft": 1.0},
                                   {"model": "tiny-ddpm", "anchor": 1.0},
                                   {"train_fraction": 0.4}), ids=str)
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
    weights = t.edge_weights(tree, run.cfg)
    run.optimizer.zero_grad()
    t.accumulate_gradients(run.policy, tree.levels[::-1], adv[::-1], cond, run.cfg, weights[::-1],
                           [None] * 3)
    close_gradients([p.grad / t.LOSS_SCALE for p in run.policy.trainable], edges)

def test_extras_switched_off_leave_the_plain_tree():
    def after_one_iteration(**kw):
        run = t.Run(config(window_mode="sliding", branch=(2,), depth=4, inner_epochs=2, **kw))
        run.train_iteration()
        return values(run.trainable)
    plain = after_one_iteration(clip=0.02)
    off = {"method": "dynamic-treerpo", "sft": 0.0, "noise_growth": 0.0, "clip_min": 0.02,
           "clip_max": 0.02}
    assert same(plain, after_one_iteration(**off))
    for on in ({"sft": 0.1}, {"noise_growth": 0.5}, {"clip_min": 1e-5, "clip_max": 1e-4}):
        assert not same(plain, after_one_iteration(**off | on))

def test_weight_average_by_hand():
    run = t.Run(config(ema=0.9))
    before = values(run.trainable)
    run.train_iteration()
    for e, a, b in zip(run.ema, before, run.trainable, strict=True):
        close(e, 0.9 * a + 0.1 * b.data)
    assert not same(run.ema, before) and not same(run.ema, values(run.trainable))
    with run.averaged():
        assert same(values(run.trainable), run.ema)

@pytest.mark.parametrize("name, rates", (("constant", (1, 1, 1, 1)), ("linear", (1, .75, .5, .25)),
                                         ("cosine", (1, 0.853553, 0.5, 0.146447))))
def test_learning_rate_schedules(name, rates):
    t.train(config(lr_schedule=name, iterations=4, branch=(2,), depth=1, eval_every=4, out="a"))
    close([log["lr"] * 1e3 for log in read_log("a") if "lr" in log], [float(r) for r in rates])

# ==== 7. Many processes =========================================================================
def one_rank(rank, folder, cfg):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/sync", rank=rank,
                                         world_size=2, timeout=timedelta(seconds=60))
    out = {"one": one_iteration(cfg), "errors": []}
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
    log = run.measure() | run.train_iteration()
    return [p.grad for p in run.trainable], {k: v for k, v in log.items() if not k.startswith(TIME)}

def test_two_processes_equal_one(tmp_path):  # two prompts for one rank, one for the other
    cfg = config(branch=(2,), sft=0.1, kl=0.1, prompts_per_iteration=3, eval_images=5,
                 max_grad_norm=1e9, reward=(f"{__name__}:hooked",), out=str(tmp_path / "run"))
    children = torch.multiprocessing.spawn(one_rank, (str(tmp_path), cfg), 2, join=False)
    grads, log = one_iteration(cfg)
    end = time.monotonic() + 90
    while not children.join(timeout=1):
        if time.monotonic() > end:
            [p.kill() for p in children.processes]
            pytest.fail("the processes wait for each other")
    ranks = [torch.load(tmp_path / f"{r}.pt") for r in range(2)]
    largest = max(g.abs().max().item() for g in grads)
    assert same(ranks[0]["one"][0], ranks[1]["one"][0]) and largest > 1e-4
    for word, error in zip(("nan", "nan", "loss"), ranks[1]["errors"], strict=True):
        assert word in error
    assert ["another process" in e for e in ranks[0]["errors"]] == [True] * 3
    for out in ranks:
        for a, b in zip(out["one"][0], grads, strict=True):
            close(a, b, rtol=0, atol=1e-6 * max(1, largest))
        assert out["one"][1].keys() == log.keys()
        for k, v in log.items():
            close(out["one"][1][k], v, atol=1e-5)
        one_line(out["few"], "--prompts-per-iteration 1", ">= 2")

# ==== 8. Models: the tiny world =================================================================
def test_captions_and_drawings():
    assert len(set(t.CAPTIONS)) == 16 == len(t.caption_words(t.CAPTIONS).unique(dim=0))
    for c in t.CAPTIONS:
        ink = (t.draw_caption(c) < 0.96).any(1)  # (4, 16, 16)
        assert len(ink) == len(t.PLACES) and len(set(ink.sum((1, 2)).tolist())) == 1  # none cut off
        assert not ink[:, (0, -1)].any() and not ink[:, :, (0, -1)].any() and ink.any()

STDS = [.776, .727, .668, .601, .528, .448, .362, .261, .041, .021]  # SD 1.5, 10 steps, eta 1

def test_tiny_ddpm_has_the_grid_of_sd15():
    x, policy = torch.zeros(1, 3, 16, 16), t.TinyPolicy(config(model="tiny-ddpm"), CPU)
    assert (policy.times * 1000).round().tolist() == [901 - 100 * i for i in range(10)]
    close([policy.step(x, x, i, i + 1, 1.0)[1].item() for i in range(10)], STDS, atol=6e-4, rtol=0)

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

@pytest.mark.parametrize("kind", ("flow", "eps", "v"))
def test_denoised_by_hand(kind):
    (x0, n), a, line = torch.randn(2, 3, 1, 1, 1).unbind(), 0.4, Line(config())
    line.kind, line.grid = kind, tensor([0.1, a, 0.7])
    x, pred = a**0.5 * x0 + (1 - a)**0.5 * n, {"eps": n, "v": a**0.5 * n - (1 - a)**0.5 * x0}
    if kind == "flow":
        x, pred = (1 - a) * x0 + a * n, {"flow": n - x0}
    close(line.denoised(x, pred[kind], 1), x0)

# ---- real models, on tiny random pipelines of the three classes --------------------------------
PAIR, SIDE = ["a red cat", "two old ships in fog"], 16  # the tiny VAEs halve: latents are 8 x 8
GUIDANCE = {"sd": 5.0, "sdv": 5.0, "sd3": 4.5, "sd3-no-t5": 4.5, "flux": 3.5}
each_pipeline = pytest.mark.parametrize("name", GUIDANCE)
each_class = pytest.mark.parametrize("name", ("sd", "sd3", "flux"))
each_extent = pytest.mark.parametrize("full", (False, True))

SMALL_CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2}
WORDS = {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513}

def write_tokenizer(folder, merges=(), size=514):
    """CLIP's byte-level tokenizer with some of its merges (rank, first, second)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    names = letters + [c + "</w>" for c in letters] + [f"unused{n}" for n in range(512, size - 2)]
    for rank, first, second in merges:
        names[512 + int(rank)] = first + second
    names += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({n: i for i, n in enumerate(names)}))
    lines = ["#version: 0.2", *(f"{a} {b}" for _, a, b in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines))

def clip_text(suffix="", projected=False):
    """Parts of a pipeline: tiny CLIP text encoder and tokenizer."""
    import transformers as tf
    folder = Path(TEMP.name, "words")
    write_tokenizer(folder)
    tokenizer = tf.CLIPTokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt",
                                 model_max_length=77, pad_token="<|endoftext|>")
    kind = tf.CLIPTextModelWithProjection if projected else tf.CLIPTextModel
    encoder = kind(tf.CLIPTextConfig(**SMALL_CLIP, **WORDS, pad_token_id=513, projection_dim=16))
    return {f"text_encoder{suffix}": encoder, f"tokenizer{suffix}": tokenizer}

def t5(suffix, width):
    """Parts of a pipeline: tiny character-level T5."""
    import tokenizers as tk
    import transformers as tf
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0)]
    core = tk.Tokenizer(tk.models.Unigram(vocab + [(chr(c), -3.0) for c in range(33, 127)], 2))
    core.pre_tokenizer, core.decoder = tk.pre_tokenizers.Metaspace(), tk.decoders.Metaspace()
    core.post_processor = tk.processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    encoder = tf.T5EncoderModel(tf.T5Config(
        vocab_size=98, d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0))
    tokenizer = tf.T5TokenizerFast(tokenizer_object=core, extra_ids=0, model_max_length=512)
    return {f"text_encoder{suffix}": encoder, f"tokenizer{suffix}": tokenizer}

@functools.cache
def pipeline(name):
    """Folder of a tiny random pipeline."""
    import diffusers as d
    def vae(quant, scale, shift=None):
        return d.AutoencoderKL(
            block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, layers_per_block=1,
            latent_channels=4, sample_size=32, scaling_factor=scale, shift_factor=shift,
            use_quant_conv=quant, use_post_quant_conv=quant)
    folder, flow = Path(TEMP.name, name), d.FlowMatchEulerDiscreteScheduler
    torch.manual_seed(0)
    if name in ("sd", "sdv"):
        noise = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
                 "set_alpha_to_one": False, "steps_offset": 1}
        pipe = d.StableDiffusionPipeline(
            vae=vae(True, 0.18215), **clip_text(), feature_extractor=None,
            safety_checker=None, requires_safety_checker=False,
            scheduler=d.DDIMScheduler(
                **noise, clip_sample=False, prediction_type="v_prediction",
                timestep_spacing="trailing") if name == "sdv" else
            d.PNDMScheduler(**noise, skip_prk_steps=True),  # what the repository of SD 1.5 holds
            unet=d.UNet2DConditionModel(
                sample_size=8, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
                attention_head_dim=2, cross_attention_dim=32, dropout=0.1,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")))
    elif name == "flux":
        pipe = d.FluxPipeline(
            vae=vae(False, 0.3611, 0.1159), **clip_text(), **t5("_2", 16),
            scheduler=flow(shift=3.0, use_dynamic_shifting=True),
            transformer=d.FluxTransformer2DModel(
                patch_size=1, in_channels=16, num_layers=1, num_single_layers=1,
                attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
                pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(2, 2, 4)))
    else:
        third = {"text_encoder_3": None, "tokenizer_3": None}
        pipe = d.StableDiffusion3Pipeline(
            vae=vae(False, 1.5305, 0.0609), scheduler=flow(shift=3.0), **clip_text("", True),
            **clip_text("_2", True), **(t5("_3", 64) if name == "sd3" else third),
            transformer=d.SD3Transformer2DModel(
                sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
                attention_head_dim=8, num_attention_heads=4, joint_attention_dim=64,
                caption_projection_dim=32, pooled_projection_dim=32, pos_embed_max_size=16,
                qk_norm="rms_norm", dual_attention_layers=(0,)))
    pipe.save_pretrained(folder)
    return folder

def redness(images, prompts):
    return images[:, 0].mean((1, 2)) - images[:, 2].mean((1, 2))

def real(name, **flags):
    """Configuration of a run of a tiny pipeline."""
    cfg = t.resolve({
        "model": str(pipeline(name)), "resolution": SIDE, "dtype": "fp32", "lora_rank": 4,
        "guidance": GUIDANCE[name], "reward": (f"{__name__}:redness",), "eval_images": 2,
        "prompts_per_iteration": 2, "lora_alpha": 8, "micro_batch": 8} | flags)
    t.check_config(cfg)
    return cfg

def policy_of(name, **flags):
    cfg = real(name, **flags)
    return t.FAMILIES[t.family(cfg.model)][0](cfg, CPU)

def theirs(name, x, steps, output, change=lambda pipe: None, **kw):
    """Latents (2, 4, 8, 8) or images of diffusers' own pipeline; SD with DDIM in place of PNDM."""
    import diffusers as d
    without = {"text_encoder_3": None, "tokenizer_3": None} if name == "sd3-no-t5" else {}
    pipe = d.DiffusionPipeline.from_pretrained(pipeline(name), **without)
    pipe.set_progress_bar_config(disable=True)
    if name in ("sd", "sdv"):
        pipe.scheduler = d.DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    change(pipe)
    x = pipe._pack_latents(x, *x.shape) if name == "flux" else x
    out = pipe(PAIR, latents=x, num_inference_steps=steps, guidance_scale=GUIDANCE[name],
               height=SIDE, width=SIDE, output_type=output, **kw).images
    sigmas = getattr(pipe.scheduler, "sigmas", None)
    flat = name == "flux" and output == "latent"
    return pipe._unpack_latents(out, SIDE, SIDE, 2) if flat else out, sigmas

def ours(policy, noises, steps):
    """Our loop from noises[0], with noises[l] at the l-th stochastic step."""
    steps = t.ode_steps(range(steps + 1)) if isinstance(steps, int) else steps
    return t.rollout(policy, policy.encode(PAIR), torch.arange(2), steps,
                     lambda level, prompt: noises[level], 8).leaves

def latents(n=1):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 8, 8, generator=g) for _ in range(n)]

def shake(policy, scale=0.3):
    """Random weights where LoRA starts with zeros (or, with --full, a shift of all)."""
    g = torch.Generator().manual_seed(2)
    for name, p in policy.net.named_parameters():
        if "lora_B" in name or policy.cfg.full:
            p.data += scale * torch.randn(p.shape, generator=g)

def predictions(policy):
    [x], cond = latents(), policy.encode(PAIR)
    with torch.no_grad():
        return torch.stack([policy.predict(x, i, cond) for i in (0, 3)])

@pytest.mark.parametrize("steps", (5, 10))
@each_pipeline
def test_without_noise_equals_the_pipeline(name, steps):
    policy, [x] = policy_of(name, steps=steps), latents()
    out, sigmas = theirs(name, x, steps, "latent")
    got = ours(policy, [x], steps)
    assert (out - x).abs().max() > 0.1
    close(got, out, atol=1e-5, rtol=1e-6)
    if steps == 5:
        images = policy.decode(got)
        assert images.shape == (2, 3, SIDE, SIDE) and images.std() > 0.05
        close(images, theirs(name, x, steps, "pt")[0], rtol=0, atol=1e-5)
    elif name == "sd3":  # the scheduler's shift of 3, applied twice
        grid = [1, .9601, .9133, .8577, .7904, .7073, .6022, .4649, .2780, .0089, 0]
        close(policy.grid, grid, atol=5e-5, rtol=0)
    elif name == "flux":
        assert torch.equal(policy.grid, sigmas)
    elif name == "sd":
        close([policy.step(x, x, i, i + 1, 1.0)[1] for i in range(10)], STDS, atol=6e-4, rtol=0)
        assert policy.times.tolist() == list(range(901, 0, -100))

@pytest.mark.parametrize("name", ("sd", "sdv"))
def test_sd_with_eta_1_equals_the_pipeline(name):
    x, *noises = latents(6)
    g = torch.Generator().manual_seed(1)
    torch.randn(x.shape, generator=g)  # the pipeline draws the other five in turn
    steps = [t.Step(i, i + 1, 1, 1.0, True) for i in range(5)]
    got = ours(policy_of(name, steps=5), [x, *noises], steps)
    close(got, theirs(name, x, 5, "latent", eta=1.0, generator=g)[0], rtol=1e-6, atol=1e-5)

@each_extent
@each_class
def test_reference_is_the_untrained_model(name, full):
    policy = policy_of(name, full=full)
    before = predictions(policy)
    with policy.reference():
        assert torch.equal(predictions(policy), before)
    shake(policy, 0.1)
    after = predictions(policy)
    assert (after - before).abs().max() > 1e-3
    with policy.reference():
        assert torch.equal(predictions(policy), before)
    assert torch.equal(predictions(policy), after)
    assert all(p.requires_grad for p in policy.trainable)

@each_extent
@each_class
def test_weights_load_into_a_fresh_pipeline(name, full, tmp_path):
    policy, [x] = policy_of(name, steps=4, full=full, lora_alpha=16), latents()
    base = ours(policy, [x], 4)
    shake(policy, 0.02 if full else 0.3)
    got = ours(policy, [x], 4)
    policy.export(tmp_path)
    def change(pipe):
        if full:
            kind = type(policy.net)
            setattr(pipe, policy.core, kind.from_pretrained(tmp_path, subfolder=policy.core))
        else:
            pipe.load_lora_weights(tmp_path)
    assert (got - base).abs().max() > 0.02
    close(got, theirs(name, x, 4, "latent", change=change)[0], atol=1e-4, rtol=1e-4)
    other = policy_of(name, steps=4, full=full, lora_alpha=16)
    assert not torch.equal(predictions(other), predictions(policy))
    other.restore(tmp_path)
    assert torch.equal(predictions(other), predictions(policy))

@each_class
def test_lora_sits_on_attention_only_and_depends_on_the_seed(name):
    layers = {"to_q", "to_k", "to_v", "0"}
    layers |= {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"} if name != "sd" else set()
    nets = [policy_of(name, seed=s).net.state_dict() for s in (0, 0, 1)]
    lora = [k for k in nets[0] if "lora_A" in k]
    assert {k.split(".lora_A")[0].split(".")[-1] for k in lora} == layers
    assert not any("attn2" in k for k in lora) or name == "sd"  # Flow-GRPO
    assert all(torch.equal(nets[0][k], nets[1][k]) for k in lora)
    assert not any(torch.equal(nets[0][k], nets[2][k]) for k in lora)

SMALL = {"treegrpo": {"branch": (2,), "depth": 2, "steps": 4},
         "flow-grpo": {"roots": 2, "steps": 3, "kl": 0.0}}

@pytest.mark.parametrize("method", SMALL)
@each_class
def test_real_models_train_and_resume(name, method):
    cfg = real(name, method=method, out="a", iterations=2, **SMALL[method])
    start, run = values(policy_of(name).trainable), t.train(cfg)
    assert all(x["ratio_max/0"] == 0 and x["grad_norm/0"] > 0 for x in read_log("a")[1:])
    moved = [not torch.equal(p, s) for p, s in zip(run.trainable, start, strict=True)]
    assert sum(moved) > len(moved) / 2
    t.train(dataclasses.replace(cfg, out="b", iterations=1))
    assert t.main(["--resume", "b", "--iterations", "2"]) == 0
    assert same(checkpoint("a")["weights"], checkpoint("b")["weights"])
    assert Path("a/best/pytorch_lora_weights.safetensors").exists()

def grow_and_credit(run):
    slots, prompts = t.draw_prompts(run.cfg, run.prompts, 0)
    tree, _, rewards = run.grow(0, slots, prompts)
    leaf = t.leaf_advantages(rewards, tree.prompt, run.weights)
    adv = t.edge_advantages(tree, rewards, run.cfg, run.weights)
    return tree, adv, leaf, run.policy.encode(prompts)

@each_class
def test_gradient_checkpointing_is_active_and_changes_nothing(name, monkeypatch):
    calls, original, grads = [], torch.utils.checkpoint.checkpoint, []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint",
                        lambda *a, **k: calls.append(1) or original(*a, **k))
    for on in (False, True):
        run = t.Run(real(name, grad_checkpointing=on, lr=1e-2, **SMALL["treegrpo"]))
        rollout, before = grow_and_credit(run), values(run.trainable)
        assert not calls
        log = t.update(run.policy, *rollout[:3], rollout[3], run.cfg, run.optimizer)
        grads.append([p.grad.clone() for p in run.trainable])
        assert log[0]["ratio_max"] == 0 and not same(values(run.trainable), before)
    assert calls and max(g.abs().max() for g in grads[0]) > 1e-3
    for a, b in zip(*grads):
        close(a, b, atol=1e-6, rtol=1e-5)

class Saved:
    """What autograd keeps of one tensor; counts the bytes alive."""

    alive = peak = 0

    def __init__(self, tensor):
        self.tensor, self.bytes = tensor, tensor.nbytes
        Saved.alive += self.bytes
        Saved.peak = max(Saved.peak, Saved.alive)

    def __del__(self):
        Saved.alive -= self.bytes

@pytest.mark.parametrize("name", ("sd", "sd3"))
def test_a_larger_tree_needs_no_larger_batch_and_no_larger_graph(name):
    batches, peaks = [], []
    for depth in (2, 3):  # 9 and 27 leaves
        run = t.Run(real(name, branch=(3,), depth=depth, steps=5, micro_batch=3,
                         prompts_per_iteration=1))
        seen = []
        run.policy.net.register_forward_pre_hook(
            lambda m, args, kw, seen=seen: seen.append(
                len(args[0] if args else kw["hidden_states"])), with_kwargs=True)
        tree, adv, leaf, cond = grow_and_credit(run)
        assert len(tree.leaves) == 3**depth and tree.leaves.device.type == "cpu"
        Saved.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda s: s.tensor):
            t.update(run.policy, tree, adv, leaf, cond, run.cfg, run.optimizer)
        assert Saved.alive == 0
        batches.append(max(seen))
        peaks.append(Saved.peak)
    assert batches == [6, 6]  # 3 nodes, doubled by guidance
    assert peaks[0] == peaks[1] > 0

@each_extent
@each_class
def test_bf16_trains_float32_weights(name, full):
    run = t.Run(real(name, dtype="bf16", full=full, grad_checkpointing=not full,
                     **SMALL["treegrpo"]))
    policy, before, log = run.policy, values(run.trainable), run.train_iteration()
    assert {p.dtype for p in policy.trainable} == {torch.float32}
    frozen = {p.dtype for p in policy.net.parameters() if not p.requires_grad}
    assert frozen <= {torch.float32} if full else frozen == {torch.bfloat16}
    assert {p.dtype for p in policy.vae.parameters()} == {torch.float32}
    assert log["ratio_max/0"] == 0 and math.isfinite(log["grad_norm/0"])
    assert not same(values(policy.trainable), before)
    assert run.sample(PAIR, ("test",), [0, 1]).dtype == torch.float32

def test_text_is_encoded_once():
    policy, seen = policy_of("sd3"), []
    policy.pipe.text_encoder.register_forward_hook(lambda *_: seen.append(1))
    first, again = policy.encode(PAIR), policy.encode(PAIR[::-1])
    assert len(seen) == 3  # two prompts and the empty one
    assert first["text"].shape[:2] == (2, 2) and first["text"].device.type == "cpu"
    assert torch.equal(first["text"].flip(0), again["text"])

def test_models_that_cannot_be_used_are_one_line(tmp_path, capsys):
    empty, foreign, sd, sdv, sd3 = [tmp_path / n for n in ("empty", "foreign", "sd", "sdv", "sd3")]
    empty.mkdir(), foreign.mkdir()
    (foreign / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    for folder in (sd, sdv, sd3):
        shutil.copytree(pipeline(folder.name), folder)
    (sd / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    scheduler = sdv / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace("v_prediction", "sample"))
    shutil.rmtree(sd3 / "text_encoder_3")  # as users leave T5 out: this one is used
    assert policy_of("sd3", model=str(sd3)).pipe.text_encoder_3 is None
    fits = "--resolution {}: must be a multiple of {} "
    for model, side, *says in (
            ("sd15", 512, t.REPOSITORIES["sd15"], "--model FOLDER"), ("some/model", 512, "FOLDER"),
            ("sd3", 512, t.REPOSITORIES["sd3"], "--model FOLDER", "licence must be accepted"),
            (empty, SIDE, "model_index.json"), (sd, SIDE, "not a complete pipeline"),
            (foreign, SIDE, "WanPipeline: allowed are StableDiffusionPipeline"),
            (sdv, SIDE, "predicts sample: allowed are epsilon, v_prediction"),
            (sd, 17, fits.format(17, 2)), (sd3, 18, fits.format(18, 4)),
            (pipeline("flux"), 22, fits.format(22, 4))):
        argv = ["--model", model, "--resolution", side, "--dtype", "fp32", "--reward",
                f"{__name__}:redness", "--out", "run"]
        assert t.main([str(a) for a in argv]) == 2 and not Path("run/config.json").exists()
        err = capsys.readouterr().err.splitlines()[-1]
        one_line(err, *says)
        assert ("licence" in err) == (model == "sd3")

# ==== 9. Rewards ================================================================================
GOOD, TWO = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), [C, "a blue cross"]

def test_shapes_reward_knows_its_drawings():
    reward = t.shapes_reward("cpu")
    for c, other in itertools.product(t.CAPTIONS, repeat=2):
        got = reward(t.draw_caption(c), [other] * 4)
        assert (got == 1).all() if c == other else (got < 0.95).all(), (c, other, got)

def test_user_reward_and_weights():
    Path("my_rewards.py").write_text("def bright(images, prompts):\n"
                                     "    return images.mean((1, 2, 3)).requires_grad_()")
    run = t.Run(config(reward=("shapes:0.8", "my_rewards:bright:0.2"), out="run"))
    _, images, rewards = run.grow(0, [0], [t.CAPTIONS[5]])
    close(rewards[0], t.shapes_reward("cpu")(images, [t.CAPTIONS[5]] * 27))
    close(rewards[1], images.mean((1, 2, 3)))
    assert list(run.weights) == pytest.approx([0.8, 0.2]) and not rewards.requires_grad
    specs = {"a.b:f": ("a.b:f", 1.0), "shapes": ("shapes", 1.0), "hpsv2:0.8": ("hpsv2", 0.8),
             "jpeg:-1": ("jpeg", -1.0), "m:f:0.5": ("m:f", 0.5)}
    assert {s: t.parse_reward(s) for s in specs} == specs
    Path("broken_rewards.py").write_text("def red(:\n")
    for bad in ("my_rewards:blue", "broken_rewards:red", "no_such_module:red"):
        with pytest.raises(t.UsageError, match=bad) as e:
            t.load_function("--reward", bad)
        one_line(str(e.value))

BAD_REWARDS = [  # function of images and prompts, fragment of the message
    (lambda i, p: torch.zeros(len(i), 1), ", 1)"), (lambda i, p: torch.zeros(3), "(3,)"),
    (lambda i, p: torch.zeros(len(i), dtype=torch.long), "int64"), (lambda i, p: [0.5], "list"),
    (lambda i, p: None, "NoneType"), (lambda i, p: 1 / 0, "ZeroDivisionError")]

@pytest.mark.parametrize("pixel", (math.nan, math.inf, -0.5, 1.5, 0.0))
def test_broken_images_name_the_prompt(pixel):
    images = GOOD.clone()
    images[1] *= pixel != 0  # all black
    images[1, 0, 0, 0] = pixel
    with pytest.raises(t.NumericalError, match="a blue cross"):
        t.score({"shapes": None}, images, TWO)

def test_wrong_sizes_and_empty_prompts_are_refused():
    for images in (GOOD[:1], GOOD[:, :1], GOOD[0], GOOD.flatten(1), (GOOD * 255).byte()):
        with pytest.raises(t.RewardError, match="images are"):
            t.score({"shapes": None}, images, TWO)
    for prompt in ("", " \n"):
        with pytest.raises(t.RewardError, match="empty"):
            t.score({"shapes": None}, GOOD, [C, prompt])

# ==== 10, 11. Loop ==============================================================================
ARGS = ("--prompts-per-iteration 2 --branch 2 --eval-every 2 --eval-images 4 --ema 0.9 "
        f"--inner-epochs 2 --lr 1e-3 --reward {__name__}:hooked").split()

def cli(*argv):
    return t.main([*ARGS, *map(str, argv)])

def read_log(folder):
    lines = [json.loads(x) for x in (Path(folder) / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if not k.startswith(TIME)} for x in lines]

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
    anchor = t.PRESETS[method].get("anchor", 0.0)
    run = t.Run(cfg := config(method, model=model, out="run", anchor=anchor))
    before = values(run.trainable)
    for i in range(2):
        run.iteration, steps = i, t.schedule(cfg, i)
        seen, log = run.policy.evaluations, run.train_iteration()
        sample, train = t.nfe(steps, cfg.roots, cfg.inner_epochs, cfg.kl, anchor)
        assert log["evaluations_sample"] == 2 * sample
        assert run.policy.evaluations - seen == 2 * (sample + train)
        assert log["ratio_max/0"] == 0 and 0 < log["grad_norm/0"] < math.inf
        assert log["window"] == next(s.i for s in steps if s.noise)
    assert not same(before, values(run.trainable))

@each_model
def test_resumed_equals_uninterrupted(model, capsys):
    rate = ("--model", model, "--lr-schedule", "constant")  # others depend on the run's length
    assert cli(*rate, "--out", "a", "--iterations", 4) == 0
    assert cli(*rate, "--out", "b", "--iterations", 2) == 0
    with open("b/log.jsonl", "a") as f:  # a process killed after its checkpoint
        f.write('{"iteration": 3, "reward": 9}\n{"iterat')
    assert t.main(["--resume", "b", "--iterations", "4", "--micro-batch", "128"]) == 0
    assert_same_run("a", "b")
    assert [x["iteration"] for x in read_log("b")] == [0, 1, 2, 3, 4]
    capsys.readouterr()
    assert t.main(["--resume", "b", "--lr", "5"]) == 2
    one_error(capsys, "--lr 5.0", "0.001", "iterations")

def test_run_folder_is_kept_and_locked(capsys):
    assert cli("--out", "a", "--iterations", 1) == 0
    before = Path("a/log.jsonl").read_bytes() + Path("a/config.json").read_bytes()
    capsys.readouterr()
    assert cli("--out", "a", "--iterations", 1, "--seed", 1) == 2
    one_error(capsys, "--resume a", "--overwrite")
    with open("a/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli("--out", "a", "--iterations", 1, "--seed", 1, "--overwrite") == 2
        one_error(capsys, "another run is writing")
        assert t.main(["--resume", "a"]) == 2
        one_error(capsys, "another run is writing")
    assert before == Path("a/log.jsonl").read_bytes() + Path("a/config.json").read_bytes()
    assert cli("--out", "a", "--iterations", 1, "--seed", 1, "--overwrite") == 0
    assert json.loads(Path("a/config.json").read_text())["seed"] == 1 and len(read_log("a")) == 2

def test_prompts_are_drawn_in_epochs():
    cfg, names = config(prompts_per_iteration=3), list("abcdefg")
    drawn = [p for i in range(7) for p in t.draw_prompts(cfg, names, i)[1]]
    epochs = [drawn[n:n + 7] for n in (0, 7, 14)]
    assert all(sorted(e) == names for e in epochs) and epochs[0] != epochs[1]
    assert t.draw_prompts(cfg, ["x"], 0) == ([0, 1, 2], ["x"] * 3)

# ==== Faults ====================================================================================
PLAIN = t.shapes_reward("cpu")

def on_calls(numbers, action):
    """Calls of the reward with these numbers (1: the first evaluation) are of action instead."""
    count = itertools.count(1)
    HOOK["reward"] = lambda x, p: (action if next(count) in numbers else PLAIN)(x, p)

def script(body, *argv, launcher=()):
    """Run code on our small base in a process of its own."""
    small = {k: t.BASE[k] for k in ("width", "blocks", "heads")}
    Path("script.py").write_text(
        f"import os, random, sys, time\nsys.path[:0] = [os.getcwd(), {str(SOURCE.parent)!r}]\n"
        f"import treegrpo as t\nt.torch.set_num_threads(1)\nt.BASE.update({small})\n{body}")
    return subprocess.run([sys.executable, *launcher, "script.py", *map(str, argv)],
                          capture_output=True, text=True, timeout=500)

@pytest.mark.parametrize("kills", (3, pytest.param(20, marks=pytest.mark.slow)))
def test_killed_at_random_moments(kills):
    argv, start = [*ARGS[:-2], "--iterations", str(10 * kills), "--save-every", "1"], time.time()
    assert t.main([*argv, "--out", "a"]) == 0
    done = script(f"""for _ in range({kills}):
    pid = os.fork()
    if not pid:
        again = ["--resume", "b"] if os.path.exists("b/config.json") else {[*argv, "--out", "b"]}
        os._exit(t.main(again))
    while not os.path.exists("b/config.json"):
        time.sleep(0.001)
    time.sleep(random.uniform(0, {(time.time() - start) / kills}))
    os.kill(pid, 9)
    assert os.waitpid(pid, 0)[1] == 9, "it had ended" """)
    assert done.returncode == 0, done.stderr
    assert t.main(["--resume", "b"]) == 0
    assert_same_run("a", "b")

def kill_at(patch, owner, name, call, number):
    """Send this process a signal when a function is called for the call-th time."""
    function, count = getattr(owner, name), itertools.count(1)
    def killing(*args):
        if next(count) == call:
            os.kill(os.getpid(), number)
        return function(*args)
    patch.setattr(owner, name, killing)

@pytest.mark.parametrize("phase, owner, name, call, iteration", (
    ("evaluation", t.Run, "measure", 1, 0), ("rollout", t.Run, "grow", 1, 1),
    ("update", t, "update", 2, 2), ("save", t, "save_atomic", 5, 1)))
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_signal_leaves_a_checkpoint(phase, owner, name, call, iteration, number, monkeypatch):
    argv = ("--iterations", 3, "--save-every", 1)
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call, number)
        cli("--out", "b", *argv)
    assert checkpoint("b")["progress"]["iteration"] == iteration
    assert t.main(["--resume", "b"]) == 0 and cli("--out", "a", *argv) == 0
    assert_same_run("a", "b")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

def test_resumed_from_the_first_moment():  # what was overwritten does not come back
    assert cli("--out", "a", "--iterations", 1, "--seed", 1) == 0
    on_calls((1,), lambda x, p: sys.exit("killed"))
    with pytest.raises(SystemExit):
        cli("--out", "a", "--iterations", 1, "--overwrite")
    HOOK.clear()
    assert t.main(["--resume", "a"]) == 0 and cli("--out", "b", "--iterations", 1) == 0
    assert_same_run("a", "b")

@pytest.mark.parametrize("phase", ("pretrain", "start_files", "draw_run"))
def test_ctrl_c_outside_the_loop(phase, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        if phase == "pretrain":
            patch.setenv("XDG_CACHE_HOME", "cache")
            patch.setattr(t, "pretrain", PRETRAIN)
        kill_at(patch, ev if phase == "draw_run" else t, phase, 1, signal.SIGINT)
        assert cli("--out", "a", "--iterations", 1) == 130
        assert not any(Path("cache").rglob("*.pt")) and "Traceback" not in capsys.readouterr().err
    again = ("--resume", "a") if phase == "draw_run" else (*ARGS, "--out", "a", "--iterations", "1")
    assert t.main(list(again)) == 0 and checkpoint("a")["progress"]["iteration"] == 1

@pytest.mark.parametrize("fault", ("full", "read-only"))
def test_a_disk_that_fails_is_one_line(fault, capfd):
    """Files end at 50 kB, or the folder takes no more files, during iteration 2."""
    old, user, kind = resource.getrlimit(resource.RLIMIT_FSIZE), os.geteuid(), resource.RLIMIT_FSIZE
    def fail(images, prompts):
        if fault == "full":
            resource.setrlimit(kind, (50_000, old[1]))
        else:
            Path("a").chmod(0o555)
            os.seteuid(user or 65534)  # root may write anywhere
        return PLAIN(images, prompts)
    argv = ("--iterations", 3, "--save-every", 1, "--eval-every", 9)
    on_calls((3,), fail)
    try:
        assert cli("--out", "a", *argv) == 1
    finally:
        os.seteuid(user)
        resource.setrlimit(kind, old)
        Path("a").chmod(0o755)
    error = {"full": "a/last.pt: cannot be written", "read-only": "Permission denied"}[fault]
    one_line(capfd.readouterr().err.splitlines()[-1], "treegrpo: ", error)
    assert checkpoint("a")["progress"]["iteration"] == 1 and not list(Path("a").glob("*.part"))
    HOOK.clear()
    assert t.main(["--resume", "a"]) == 0 and cli("--out", "b", *argv) == 0
    assert_same_run("a", "b")

def test_damaged_checkpoints_are_refused(capsys):
    assert cli("--out", "a", "--iterations", 1) == 0
    path, state = Path("a/last.pt"), checkpoint("a")
    whole, old = path.read_bytes(), {k: v for k, v in state.items() if k != "ema"}
    foreign = state | {"weights": [torch.zeros(1) for _ in state["weights"]]}
    for bad in (None, b"", b"PK not a checkpoint", whole[:-2000], whole[2000:], {"model": 1}, old,
                foreign, state | {"weights": state["weights"][1:]}, state | {"code": damaged}):
        path.unlink(missing_ok=True)
        path.write_bytes(bad) if isinstance(bad, bytes) else bad and torch.save(bad, path)
        capsys.readouterr()
        assert t.main(["--resume", "a", "--iterations", "2"]) == 2
        one_error(capsys, "a/last.pt is not a checkpoint of this run")

def last(value):
    """NaN in the last row."""
    return torch.cat([value[:-1], value[-1:] * math.nan])

def hook_last(out):
    out.register_hook(last) if out.requires_grad else None
    return out

NAN = {  # where: method of the policy, what is made of its result
    "denoiser output": ("denoise", lambda out, x, i, cond: last(out) if i == 4 else out),
    "latents": ("step", lambda out, x, p, i, *_: (last(out[0]), out[1]) if i == 4 else out),
    "image": ("decode", lambda out, x: last(out)), "reward": ("predict", lambda out, *_: out),
    "loss": ("denoise", lambda out, *_: last(out) if out.requires_grad else out),
    "gradient": ("denoise", lambda out, *_: hook_last(out))}

@pytest.mark.parametrize("where", NAN)
def test_three_bad_iterations_stop_with_state_saved(where, monkeypatch, capfd):
    (name, wrong), evaluated = NAN[where], []
    right = getattr(t.TinyPolicy, name)
    monkeypatch.setattr(t.TinyPolicy, name, lambda self, *a: (wrong if evaluated else (
        lambda out, *_: out))(right(self, *a), *a))
    HOOK["reward"] = lambda x, p: (last if where == "reward" and evaluated else (
        lambda value: evaluated.append(1) or value))(PLAIN(x, p))
    assert cli("--out", "a", "--iterations", 9, "--save-every", 9, "--seed", 7, "--depth", 1,
               "--window-mode", "fixed", "--window-start", 4, "--eval-every", 9) == 1
    one_line(capfd.readouterr().err.splitlines()[-1], "three iterations in a row failed")
    log, state, cfg = read_log("a"), checkpoint("a"), t.read_config(Path("a"))
    assert [bool(x.get("skipped")) for x in log] == [False] + [True] * 3
    for i, line in enumerate(log[1:]):
        first, second = t.draw_prompts(cfg, t.CAPTIONS, i)[1]
        one_line(line["skipped"], where, second, f"(iteration {i}, seed 7)",
                 "" if where in ("image", "reward") else "at step 4")
        assert (first in line["skipped"]) == (where == "gradient")  # known by micro-batch
    assert state["progress"]["iteration"] == 3
    assert same(state["weights"], [p.data for p in t.tiny_base("tiny").parameters()])

def test_bad_values_skip_what_they_spoil_only(capfd):
    on_calls((1, 2, 3, 5, 6, 7), lambda x, p: PLAIN(x, p) / 0)  # 1 and 7 evaluate
    assert cli("--out", "a", "--iterations", 5, "--eval-every", 9, "--seed", 7) == 0
    err, log = capfd.readouterr().err, read_log("a")
    assert ["skipped" in x for x in log] == [False, True, True, False, True, True]
    assert ["eval_skipped" in x for x in log] == [True] + [False] * 4 + [True]
    for line in log:
        for message in (line.get("skipped"), line.get("eval_skipped")):
            assert not message or message in err and "seed 7" in message
    DRAW_RUN(t.Run(t.read_config(Path("a"))))  # though nothing was evaluated
    assert Path("a/curve.png").exists()

@pytest.mark.parametrize("bad, message", BAD_REWARDS)
@pytest.mark.parametrize("call", (3, 4))  # in iteration 2, and in the evaluation after it
def test_faulty_reward_function(bad, message, call, capfd):
    on_calls((call,), bad)
    assert cli("--out", "a", "--iterations", 4, "--save-every", 9) == 1
    one_line(capfd.readouterr().err.splitlines()[-1], message, f"{__name__}:hooked", "prompts, the")
    assert checkpoint("a")["progress"]["iteration"] == call - 2

def test_a_rank_that_dies_stops_the_others():
    Path("fatal.py").write_text(
        "import itertools, os\nimport treegrpo as t\ncount, plain = itertools.count(1), t.shapes_"
        "reward('cpu')\ndef fatal(x, p):\n    if os.environ.get('RANK') == '1' and next(count) == 4"
        ":\n        os.kill(os.getpid(), 9)\n    return plain(x, p)\n")
    argv, start = [*ARGS[:-1], "fatal:fatal", "--out", "a", "--eval-every", "9"], time.time()
    done = script("sys.exit(t.main(sys.argv[1:]))", *argv, "--save-every", 1, "--iterations", 9,
                  launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"))
    assert done.returncode == 1 and time.time() - start < 120, done.stderr
    assert checkpoint("a")["progress"]["iteration"] == 2
    assert t.main(["--resume", "a", "--iterations", "4"]) == 0 and len(read_log("a")) == 5

def test_nothing_is_unpickled_and_nothing_is_sent(monkeypatch):
    for source in (SOURCE, Path(ev.__file__)):
        text = source.read_text()
        safe = re.findall(r"torch\.load\(.{1,150}?weights_only=True", text, re.DOTALL)
        assert len(safe) == text.count("torch.load(") > 0
        assert not re.search(r"pickle\b|wandb|requests|urllib|socket|remote_code"
                             r"|[ (](eval|exec)\(", text)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    Path("tracker.py").write_text("lines = []\ndef track(line):\n    lines.append(dict(line))\n")
    assert cli("--out", "a", "--iterations", 2, "--track", "tracker:track") == 0
    seen = [json.loads(x) for x in Path("a/log.jsonl").read_text().splitlines()]
    assert sys.modules.pop("tracker").lines == seen and len(seen) == 3

@pytest.mark.slow
def test_a_long_run_keeps_its_memory_and_ratio():
    assert t.main("--branch 2 --depth 1 --steps 2 --prompts-per-iteration 1 --inner-epochs 2 --lr "
                  "1e-5 --iterations 2000 --eval-every 500 --eval-images 4 --out a".split()) == 0
    log = [json.loads(x) for x in Path("a/log.jsonl").read_text().splitlines()]
    assert [x["iteration"] for x in log] == list(range(2001))
    assert all(math.isfinite(v) for x in log for v in x.values())  # none is skipped
    assert {x["ratio_max/0"] for x in log[1:]} == {0}
    early, late = [statistics.median(x["ratio_max/1"] for x in log[a:b])
                   for a, b in ((1, 500), (1501, 2001))]
    assert 0 < late < 3 * early
    assert log[-1]["memory_update"] < 1.02 * log[200]["memory_update"]

# ==== evaluate.py: 1, 2. Runs and pictures ======================================================
def trained(*flags, name="run", shift=0.02):
    """A run folder as training leaves it, with weights moved at random."""
    cfg = t.parse([*flags, "--out", name, "--eval-images", "8", "--iterations", "3"])
    run = t.Run(cfg)
    cfg.folder.mkdir(parents=True)
    (cfg.folder / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    log = [{"iteration": 0} | run.measure()]
    for p in run.trainable:
        p.data += shift * torch.randn_like(p)
    run.iteration = 3
    log.append({"iteration": 3, "reward": 0.3} | run.measure())
    (cfg.folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    run.policy.export(cfg.folder / "best")
    run.save()
    return run

def evaluate(*argv):
    return ev.main([str(a) for a in argv])

@pytest.mark.parametrize("flags", (
    "", "--branch 3 1 2", "--method flow-grpo --roots 13", "--method tempflow-grpo",
    "--branch 3 --depth 4 --window-mode fixed --window-start 3", "--model tiny-ddpm --branch 2"))
def test_pictures(flags):
    from PIL import Image
    run = trained(*flags.split())
    DRAW_RUN(run)
    for name in ("curve", "grid", "tree"):
        width, height = Image.open(run.cfg.folder / f"{name}.png").size
        assert 500 < width < 6000 and 250 < height < 4000, (name, width, height)

def test_no_matplotlib_is_no_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    DRAW_RUN(trained())
    assert "matplotlib" in capsys.readouterr().out and not Path("run/tree.png").exists()

def level(*parent):
    return t.Level(*[None] * 4, tensor(parent), *[None] * 3)

def test_tree_places_by_hand():
    """Root 0 has edges 0, 2; root 1 edge 1. Below: edge 0 and 3 from node 0, 1 from 1, 2 from 2."""
    tree = t.Tree([level(0, 1, 0), level(0, 1, 2, 0)], torch.zeros(4, 1), None,
                  tensor([0, 1, 0, 0]), None)
    top, middle, leaves = ev.tree_rows(tree)
    assert leaves == {0: 1.0, 3: 2.0, 2: 3.5, 1: 5.0}  # left to right, a gap between families
    assert middle == {0: 1.5, 2: 3.5, 1: 5.0} and top == {0: 2.5, 1: 5.0}

def test_large_trees_are_cut():
    chains = t.Tree([level(*range(24))] * 3, torch.zeros(24, 1), None, torch.arange(24), None)
    assert [len(row) for row in ev.tree_rows(chains)] == [12] * 4
    wide = t.Tree([level(*[n // 100 for n in range(200)])], torch.zeros(200, 1), None,
                  torch.zeros(200), None)
    assert [len(row) for row in ev.tree_rows(wide)] == [1, 81]

def test_weights_of_a_run():
    run = trained("--ema", "0.5")
    first = lambda weights: ev.load_run("run", weights).trainable[0]  # noqa: E731
    assert torch.equal(first("best"), run.trainable[0]) and same([first("last")], run.trainable[:1])
    assert not torch.equal(first("base"), run.trainable[0])
    run.ema = [p + 1 for p in run.trainable]
    run.save()
    last, best = ev.load_run("run", "last"), ev.load_run("run", "best")
    with last.averaged(), best.averaged():
        assert torch.equal(last.trainable[0], run.ema[0])
        assert torch.equal(best.trainable[0], run.trainable[0])
    Path("run/best/model.pt").write_bytes(b"damaged")
    with pytest.raises(t.UsageError, match="run: no best weights there"):
        ev.load_run("run")

def test_sample(capsys):
    from PIL import Image
    trained()
    pictures = []
    for seed in (0, 0, 1):
        assert evaluate("sample", "run", C, "a blue cross", "--n", 3, "--seed", seed) == 0
        path = Path(capsys.readouterr().out.strip())
        pictures.append(path.read_bytes())
    assert Image.open(path).size == (3 * 132, 2 * 132)
    assert pictures[0] == pictures[1] != pictures[2]

def test_usage_errors_of_evaluate(capsys, monkeypatch):
    import huggingface_hub
    def fail(*args, **kwargs):
        raise OSError("offline")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    trained()
    Path("dogs.txt").write_text("a dog\n")
    for argv, *words in (
            ("sample run|a pink circle", "pink", "red|green|blue|yellow", "circle|square"),
            ("sample nowhere|a red circle", "nowhere", "no configuration"),
            ("score nowhere", "nowhere", "no configuration"),
            ("score run --n 0", "--n", "1 or more"),
            ("score run --metrics colur", "colur", "did you mean colour?"),
            ("score run --prompts gone.txt", "gone.txt"),
            ("score run --prompts dogs.txt", "a dog", "circle|square"),
            ("score run --prompts hpdv2", "zhwang/HPDv2"),
            ("scroe run", "scroe", "score"), ("", "required")):
        command, *prompt = argv.split("|")
        capsys.readouterr()
        assert evaluate(*command.split(), *prompt) == 2
        one_error(capsys, "evaluate: ", *words)

# ==== Scorers ===================================================================================
# HPS v2.1 equals the hpsv2 package on a small random checkpoint in open_clip's layout. Scores and
# tokens are stored from hpsv2 1.2.0; where it is installed, a test makes them again. Weights and
# pictures are integers over powers of two, alike on every machine.
SIZES = [(256, 256), (96, 256), (300, 100), (16, 24), (224, 224), (333, 221)]
PHRASES = ["a photo of a red cat, 8k", "red fox " * 50, "un café à Zürich, 東京の夜 🌃",
           "the queen’s “throne” &amp; ｆｕｌｌ ﬁgure"]
HPS_SCORES = [  # a row per picture, a column per prompt
    [-.1067307, -.3117010, -.0921683, .0447207], [-.1413778, -.3189421, -.1327262, .0143028],
    [-.1543737, -.3187775, -.1493848, -.0005254], [-.0989388, -.2938337, -.0623287, .0237264],
    [-.1032641, -.3206940, -.0944181, .0506763], [-.1227064, -.3211010, -.1148973, .0367295]]
HPS_TOKENS = [
    [49406, 320, 1125, 539, 320, 736, 2368, 267, 279, 330, 49407],
    [49406] + [736, 3240] * 37 + [736, 49407],
    [49406, 2271, 15304, 21259, 89, 6522, 4021, 267, 48338, 21078, 105, 21575, 23170, 506, 1576,
     481, 49407], [49406, 518, 2997, 568, 257, 15999, 257, 261, 1476, 5274, 49407]]
MERGES = """1 t h  3 r e  6 th e</w>  9 o n  19 t o</w>  23 i c  24 a t</w>  27 o f</w>  46 ð Ł
    53 u r  56 ' s</w>  64 e n</w>  94 h o  125 on e</w>  153 f u  154 q u  189 f i  190 a f
    214 ur e</w>  224 re d</w>  304 p ho  353 l l</w>  386 f o  408 r ic  599 th r  613 pho to</w>
    635 qu e  964 fu ll</w>  1064 ðŁ Į  1759 u n</w>  1856 c at</w>  2485 que en</w>
    2728 fo x</w>  2959 c af  3509 ric h</w>  3654 Ã ©</w>  4301 ã ģ  4302 fi g
    4762 fig ure</w>  6010 Ã ¼  14792 caf Ã©</w>  15487 thr one</w>  20566 ä º
    20747 Ã ł</w>  21063 ãģ ®  22658 å ¤  27155 æ Ŀ  47826 æĿ ±"""
SMALL_HPS = {"projection_dim": 32, "text_config": SMALL_CLIP | {
    "intermediate_size": 128, "hidden_act": "gelu", "eos_token_id": 49407}, "vision_config": {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_act": "gelu", "patch_size": 14}}
HPS_FILE = "HPS_v2.1_compressed.pt"

def open_clip_checkpoint():
    """{"state_dict": ...} with the names and shapes of open_clip's CLIP, small and random."""
    g, state = torch.Generator().manual_seed(0), {}
    def add(name, *shape, one=0):
        state[name] = (one + torch.randint(-256, 257, shape, generator=g) / 2048).half()
    def norm(name, width):
        add(name + "weight", width, one=1)
        add(name + "bias", width)
    for prefix, width in (("", 32), ("visual.", 64)):
        for p in (f"{prefix}transformer.resblocks.{n}." for n in range(2)):
            for name, rows, columns in (("attn.in_proj_", 3, 1), ("attn.out_proj.", 1, 1),
                                        ("mlp.c_fc.", 4, 1), ("mlp.c_proj.", 1, 4)):
                add(p + name + "weight", rows * width, columns * width)
                add(p + name + "bias", rows * width)
            norm(p + "ln_1.", width)
            norm(p + "ln_2.", width)
    for name, width in (("ln_final.", 32), ("visual.ln_pre.", 64), ("visual.ln_post.", 64)):
        norm(name, width)
    for name, *shape in (
            ("positional_embedding", 77, 32), ("token_embedding.weight", 49408, 32),
            ("text_projection", 32, 32), ("visual.proj", 64, 32), ("visual.class_embedding", 64),
            ("visual.positional_embedding", 257, 64), ("visual.conv1.weight", 64, 3, 14, 14)):
        add(name, *shape)
    return {"state_dict": state | {"logit_scale": tensor(4.5)}}

def picture(height, width):
    """(1, 3, H, W) uint8: random blocks of 8 pixels."""
    g = torch.Generator().manual_seed(height * width)
    blocks = torch.randint(0, 256, (1, 3, -(-height // 8), -(-width // 8)), generator=g)
    return blocks.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :height, :width].byte()

def scorer(name, folder=None):
    return ev.SCORERS[name](CPU, folder)

@functools.cache
def hps_folder():
    folder, words = Path(TEMP.name, "hps"), MERGES.split()
    write_tokenizer(folder, list(zip(words[::3], words[1::3], words[2::3])), 49408)
    torch.save(open_clip_checkpoint(), folder / HPS_FILE)
    return folder

def clip_folder(width=16):
    """A tiny CLIP with features of some width, as published: with constants that are not loaded."""
    from safetensors.torch import save_file
    from transformers import CLIPConfig, CLIPModel
    folder = Path(TEMP.name, str(width), "clip-vit-large-patch14")
    config = CLIPConfig(text_config=SMALL_CLIP | WORDS, projection_dim=width,
                        vision_config=SMALL_CLIP | {"image_size": 32, "patch_size": 8})
    state = CLIPModel(config).state_dict()
    state = {k: v + 0.1 * torch.randn_like(v) for k, v in state.items() if v.is_floating_point()}
    state |= {f"{kind}_model.embeddings.position_ids": torch.arange(n)[None]
              for kind, n in (("text", 77), ("vision", 17))}
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    return folder

def test_hpsv2_equals_the_package(monkeypatch):
    monkeypatch.setattr(ev, "VIT_H", SMALL_HPS)
    seen, load = [], ev.load_clip
    def spy(*args):
        model, tokenizer = load(*args)
        features = model.get_text_features
        model.get_text_features = lambda ids: seen.append(ids[0].tolist()) or features(ids)
        return model, tokenizer
    monkeypatch.setattr(ev, "load_clip", spy)
    hps = scorer("hpsv2", hps_folder())
    for size, row in zip(SIZES, HPS_SCORES, strict=True):
        image = (picture(*size) / 255).expand(len(PHRASES), -1, -1, -1)
        close(t.score({"hpsv2": hps}, image, PHRASES)[0], row, rtol=0, atol=1e-5)
    prompts = PHRASES + ["the end <|endoftext|> of"]
    hps(torch.rand(10, 3, 32, 32), prompts * 2)  # cached: each prompt is encoded once
    assert [row[:row.index(49407) + 1] for row in seen[:4]] == HPS_TOKENS
    assert len(seen) == 5 and all(len(row) == 77 for row in seen)
    assert seen[4].index(49407) > 5  # a special token's name in a prompt is only text
    x = picture(*SIZES[0]) / 255  # each image meets its own prompt, in a batch as one by one
    images, order = torch.cat([x, x.flip(2), x.flip(3), 1 - x]), tensor([2, 0, 3, 1])
    scores = hps(images, PHRASES)
    close(hps(images[order], [PHRASES[n] for n in order]), scores[order])
    close(torch.cat([hps(i[None], [p]) for i, p in zip(images, PHRASES)]), scores)
    close(hps(images.repeat(9, 1, 1, 1), PHRASES * 9), scores.repeat(9))  # more than one chunk
    assert scores.dtype == torch.float32 == hps(images.bfloat16(), PHRASES).dtype

def test_stored_scores_are_the_package_s_own(monkeypatch):
    from PIL import Image
    img_score = pytest.importorskip("hpsv2.img_score")
    make, factory = img_score.create_model_and_transforms, "hpsv2.src.open_clip.factory"
    monkeypatch.setitem(sys.modules[factory]._MODEL_CONFIGS, "ViT-H-14", {
        "embed_dim": 32, "vision_cfg": {"image_size": 224, "layers": 2, "width": 64,
                                        "head_width": 16, "patch_size": 14},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2,
                     "layers": 2}})
    monkeypatch.setattr(img_score, "create_model_and_transforms",
                        lambda name, pretrained, **k: make(name, None, **k))
    for size, row in zip(SIZES, HPS_SCORES, strict=True):
        image, file = Image.fromarray(picture(*size)[0].permute(1, 2, 0).numpy()), hps_folder()
        got = [float(img_score.score(image, p, cp=f"{file}/{HPS_FILE}")[0]) for p in PHRASES]
        close(got, row, rtol=0, atol=1e-5)
    tokens = img_score.get_tokenizer("ViT-H-14")(PHRASES).tolist()
    assert [row[:row.index(49407) + 1] for row in tokens] == HPS_TOKENS

def test_clip_pixels_equal_the_image_processor():
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    for size in SIZES + [(224, 231), (225, 224)]:
        image = picture(*size) // 2 + 64  # PIL clips overshoots between its two passes: leave none
        want = CLIPImageProcessorPil()(image[0].permute(1, 2, 0).numpy(), return_tensors="pt")
        off = (ev.clip_pixels(image / 255, 224) - want.pixel_values).abs().max()
        assert off < 1.5 / 255 / min(ev.CLIP_STD)  # it rounds to 8 bits twice

def test_clip_and_aesthetic_equal_a_direct_computation(tmp_path):
    from transformers import CLIPModel, CLIPTokenizer
    folder, images = clip_folder(), torch.rand(3, 3, 40, 50)
    prompts = ["a cat", "Ünï “x” &amp;", "a very long prompt " * 20]
    words = CLIPTokenizer.from_pretrained(folder)(prompts, padding=True, truncation=True,
                                                  max_length=77, return_tensors="pt")
    with torch.no_grad():
        out = CLIPModel.from_pretrained(folder)(pixel_values=ev.clip_pixels(images, 32), **words)
    want = (out.image_embeds * out.text_embeds).sum(1)
    for name in ("clip", "pickscore"):
        close(scorer(name, folder)(images, prompts), want)
    assert want.std() > 1e-3
    folder, width, L, D = clip_folder(768), 768, torch.nn.Linear, torch.nn.Dropout
    mlp = torch.nn.Sequential(L(width, 1024), D(0.2), L(1024, 128), D(0.2), L(128, 64), D(0.1),
                              L(64, 16), L(16, 1)).eval()
    state = {f"layers.{k}": v for k, v in mlp.state_dict().items()}
    torch.save(state, folder.parent / "aesthetic-model.pth")
    with torch.no_grad():
        model = CLIPModel.from_pretrained(folder)
        x = model.get_image_features(ev.clip_pixels(images, 32)).pooler_output
        want = mlp(x / x.norm(dim=1, keepdim=True))[:, 0]
    close(t.score({"a": scorer("aesthetic", folder.parent)}, images, ["a"] * 3)[0], want)

def test_jpeg_grows_with_detail_and_has_two_signs():
    noise = torch.randint(0, 256, (1, 3, 64, 64), generator=torch.Generator().manual_seed(0)) / 255
    blocks = [torch.nn.functional.interpolate(noise[..., :n, :n], (64, 64)) for n in (1, 4, 16, 64)]
    rewards = {n: scorer(n) for n in ("jpeg", "incompressible")}
    small, large = t.score(rewards, torch.cat(blocks), ["x"] * 4)
    assert torch.equal(small, -large) and (large.diff() > 0).all()
    assert 0.5 < large[0] < 1.5 and large[3] > 5

def test_imagereward_scores_each_image_with_its_prompt(monkeypatch):
    with pytest.raises(t.UsageError, match="image-reward"):
        scorer("imagereward")
    model = types.SimpleNamespace(score=lambda text, image: len(text) + image.getpixel((0, 0))[0])
    package = types.SimpleNamespace(load=lambda *a, **k: model)
    monkeypatch.setitem(sys.modules, "ImageReward", package)
    got = t.score({"i": scorer("imagereward")}, torch.full((2, 3, 8, 8), 0.2), ["a", "abc"])
    assert got.tolist() == [[52.0, 54.0]]

@pytest.mark.parametrize("name", ("hpsv2", "clip", "pickscore", "aesthetic"))
def test_missing_weights_name_repository_file_size_and_flag(name, capsys):
    assert t.main(["--reward", name, "--out", "run"]) == 2
    one_error(capsys, *ev.HUB[name], f"--reward-weights {name}=")

def damaged(kind):
    """A checkpoint that is not what the reward needs."""
    state = open_clip_checkpoint()
    if kind == "missing":
        del state["state_dict"]["visual.proj"]
    elif kind == "unknown":
        state["state_dict"]["visual.new.weight"] = torch.zeros(1)
    elif kind == "shape":
        state["state_dict"]["text_projection"] = torch.zeros(32, 16)
    return {"key": state["state_dict"], "code": state | {"code": damaged}}.get(kind, state)

@pytest.mark.parametrize("kind, says", (
    ("HPS v2.0", "v2.1_compressed.pt"), ("missing", "not HPS v2.1 by its visual_proj"),
    ("unknown", "not HPS v2.1 by its vision_model"), ("shape", "not HPS v2.1 by its text_proj"),
    ("key", "state_dict"), ("code", "Weights only"), ("cut", "FOLDER"), ("tokenizer", "tokens")))
def test_wrong_hps_files_are_refused_by_name(tmp_path, monkeypatch, kind, says):
    monkeypatch.setattr(ev, "VIT_H", SMALL_HPS)
    file = tmp_path / ("HPS_v2_compressed.pt" if kind == "HPS v2.0" else HPS_FILE)
    torch.save(damaged(kind), file)
    file.write_bytes(file.read_bytes()[:5000 if kind == "cut" else None])
    with pytest.raises(t.UsageError) as e:
        scorer("hpsv2", tmp_path)
    one_line(str(e.value), says, f"{HPS_FILE} (2 GB) of xswu/HPSv2", tmp_path)

def test_wrong_architectures_are_refused(tmp_path):
    import transformers as tf
    tf.CLIPTextModel(tf.CLIPTextConfig(**SMALL_CLIP, **WORDS)).save_pretrained(tmp_path)
    for name, folder in (("hpsv2", hps_folder()), ("clip", tmp_path), ("clip", hps_folder())):
        with pytest.raises(t.UsageError) as e:  # a small model, not ViT-H/14; half a CLIP; none
            scorer(name, folder)
        one_line(str(e.value), f"--reward {name} in {folder}: ")

# ==== 3. Measures ===============================================================================
def say(colour, shape):
    return [f"a {colour} {shape}"] * 4

@pytest.mark.parametrize("caption", t.CAPTIONS)
def test_measures_of_clean_drawings(caption):
    """Every drawing has the right colour and shape, and none of the other captions'."""
    images, (_, colour, shape) = t.draw_caption(caption), caption.split()
    for c in t.COLOURS:
        assert ev.right_colour(images, say(c, shape)).tolist() == [c == colour] * 4
    for s in t.SHAPES:
        assert ev.right_shape(images, say(colour, s)).tolist() == [s == shape] * 4
    assert ev.clean_background(images, [caption] * 4).tolist() == [1] * 4
    assert ev.match(images)[1].tolist() == [0, 1, 2, 3] and ev.spread(images) == pytest.approx(1)
    assert ev.spread(images[:1].repeat(3, 1, 1, 1)) == 0

def test_shape_ignores_colour_and_colour_ignores_shade():
    images = t.draw_caption("a red cross")
    assert ev.right_shape(images.flip(1), say("red", "cross")).tolist() == [1] * 4
    assert ev.right_colour(0.6 * images + 0.3, say("red", "circle")).tolist() == [1] * 4

def test_measures_of_nothing_and_of_dirt():
    for value in (0.0, 1.0):  # all ink, no ink
        blank = torch.full((4, 3, 16, 16), value)
        assert ev.right_shape(blank, say("red", "circle")).sum() == 0 == ev.spread(blank)
    assert ev.right_colour(torch.ones(4, 3, 16, 16), say("red", "circle")).sum() == 0
    dirty = t.draw_caption(C)
    dirty[:, :, :, 15] = 0.7  # one of 16 columns is grey: not ink, not paper
    assert (ev.clean_background(dirty, say("red", "circle")) < 0.95).all()

def test_drift_measures_by_hand():
    half = torch.zeros(1, 3, 4, 4)
    half[:, 0, :, 2:] = 1  # right half red; one of 3 x-differences in one of 3 channels
    assert ev.chroma(half, [""]).item() == 0.5
    assert ev.sharpness(half, [""]).item() == pytest.approx(1 / 9)
    assert ev.prompt_diversity(half.repeat(3, 1, 1, 1)) == 0
    assert ev.prompt_diversity(torch.cat([half * 0, half * 0 + 0.25])) == pytest.approx(0.25)
    black_white = torch.arange(2.0)[:, None, None, None].expand(2, 3, 64, 64)
    assert ev.prompt_diversity(black_white) == pytest.approx(1)

# ==== 4. Scores =================================================================================
def test_intervals():
    # a difference of 0.1 with noise 0.2: 256 values have a standard error of 0.0125
    gen = torch.Generator().manual_seed(0)
    low, high = ev.bootstrap(0.1 + 0.2 * torch.randn(16, 16, generator=gen))
    assert 0 < low < 0.1 < high and 0.03 < high - low < 0.09
    low, high = ev.bootstrap(0.2 * torch.randn(16, 16, generator=gen))
    assert low < 0 < high
    # 16 prompts that differ by 1: the interval is that of 16 values, not of 256
    clustered = torch.randn(16, 1, generator=gen).expand(16, 16)
    low, high = ev.bootstrap(clustered)
    assert high - low == pytest.approx(2 * 1.96 * clustered[:, 0].std().item() / 4, rel=0.1)
    constant = tensor([[1.0] * 8, [3.0] * 8])
    assert ev.bootstrap(constant) == (1, 3)  # prompts are drawn, too
    assert math.isnan(ev.bootstrap(torch.ones(1, 1))[0])

def test_alarms():
    row = {"base": 1.0, "difference": -0.3, "low": -0.4, "high": -0.2}
    assert ev.alarm("sharpness", row, []) == "drift -30%"
    assert ev.alarm("colour", row, []) == "falls -30%"
    assert ev.alarm("colour", row | {"high": 0.1}, []) == ev.alarm("colour", row, ["colour"]) == ""
    assert ev.alarm("spread", row | {"difference": 0.9}, []) == ""

def results(folder="run"):
    summary = json.loads(Path(folder, "score", "summary.json").read_text())
    return {(r["run"], r["metric"]): r for r in summary["results"]}

def test_equal_weights_are_equal():
    trained(shift=0)  # another run, the same weights as the base: equal noise makes equal images
    for weights in ("base", "best"):
        assert evaluate("score", "run", "--weights", weights, "--n", 2) == 0
        for row in results().values():
            assert row["difference"] == row["low"] == row["high"] == 0 and row["win_rate"] == 0.5

def test_score_of_two_runs(capsys, monkeypatch):
    made, sample = [], t.Run.sample
    a, _ = trained(name="a"), trained(name="b")
    monkeypatch.setattr(t.Run, "sample", lambda *args: made.append(1) or sample(*args))
    Path("mine.py").write_text("def dark(x, prompts):\n    return -x.mean((1, 2, 3))\n")
    command = ("score", "a", "b", "--n", 3, "--metrics", "shapes", "colour", "mine:dark")
    assert evaluate(*command) == 0
    assert len(made) == 3 * 16  # the base once
    first, files = results("a"), sorted(p.name for p in Path("a/score").iterdir())
    assert files == ["grid.png", "prompts.csv", "summary.json", "summary.md"]
    assert {k[0] for k in first} == {"a", "b"} and ("b", "mine:dark") in first
    lines = Path("a/score/prompts.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 16 * 7  # runs, prompts, measures
    out = capsys.readouterr().out
    assert "closed set" in out and "| colour |" in out
    made.clear()
    assert evaluate(*command) == 0 and not made and results("a") == first
    assert evaluate("score", "a", "--n", 3, "--seed", 1) == 0 and len(made) == 2 * 16
    made.clear()
    a.trainable[-1].data += 1
    a.policy.export(a.cfg.folder / "best")  # new weights are new images
    assert evaluate(*command) == 0 and len(made) == 16 and results("a") != first

def test_images_do_not_depend_on_other_prompts():
    trained()
    Path("one.txt").write_text("a blue cross\n\na blue cross\n")
    assert evaluate("score", "run", "--n", 2, "--prompts", "one.txt") == 0
    (folder,) = Path("run").glob("eval-*")
    (png,) = folder.iterdir()
    before = png.read_bytes()
    png.unlink()
    evaluate("score", "run", "--n", 2)
    assert png.read_bytes() == before and len(list(folder.iterdir())) == 16

# ==== evaluate.py: 7. Health ====================================================================
HEALTHY = {"reward": 0.5, "zero_std_frac": 0.1, "ratio_max/0": 0.0, "grad_norm/0": 0.1,
        "grad_norm/1": 0.1, "clip_low/1": 0.1, "clip_high/1": 0.1, "saturation": 0.1,
        "diversity": 0.2}

def test_warn_by_hand():
    bad = HEALTHY | {"zero_std_frac": 0.9, "clip_low/1": 0.6}
    for log in ([HEALTHY] * 30, [HEALTHY] * 5 + [bad] * 9, [bad] * 9 + [HEALTHY]):
        assert ev.warn(log) == []
    found = ev.warn([HEALTHY] * 5 + [bad] * 10)
    assert [w.split()[0] for w in found] == ["zero_std_frac", "clip"]
    assert ev.warn([HEALTHY] * 5 + [bad] * 11) == []  # said once, and again much later
    assert len(ev.warn([bad] * 100)) == 2
    assert len(ev.warn([{"eval": 0.5}] + [bad] * 5 + [{"skipped": "x"}] + [bad] * 5)) == 2
    assert ev.warn([HEALTHY | {"clip_low/1": 0.0, "clip_high/1": 0.0}] * 10) == []
    assert ev.warn([HEALTHY | {"grad_norm/0": math.nan, "grad_norm/1": math.nan}] * 10)

def test_a_run_advises_once(capsys):
    Path("level.py").write_text("def flat(images, prompts):\n    return 0 * images[:, 0, 0, 0]\n")
    flags = ("--reward level:flat --iterations 12 --prompts-per-iteration 1 --branch 2 --depth 1 "
             "--eval-images 1 --steps 2 --out run")
    t.train(t.parse(flags.split()))
    err = capsys.readouterr().err
    assert err.count("advice: zero_std_frac 1 is outside 0 to 0.5 for 10 iterations") == 1

# ==== 9. compare ================================================================================
SHORT = "--steps 4 --prompts-per-iteration 2 --eval-images 32 --depth 2".split()

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
    assert ev.fall(result((0, 0.5), (50, 0.9), (90, 0.6), (100, 0.95))) == pytest.approx(0.3)
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
        anchor = (1 + 3 * cfg.inner_epochs) * (method == "treegrpo-fast")
        costs.append(8 * (sample + (4 if cfg.kl else 3) * train + anchor))
    assert sum(costs[:-1]) <= 50_000 < sum(costs)
    assert ev.make_job(flags, 3, 1, 1, Path("x")).cfg.iterations == 1

def test_cost_of_a_prompt_by_the_start_of_the_window():
    def costs(method):
        return ev.start_costs({"config": dataclasses.asdict(t.parse(["--method", method]))})
    sampling = [202, 176, 150, 124, 98, 72, 46]  # 1 + 1 + 3 + 9 + 27 ... ; 13 nodes are trained
    assert costs("treegrpo-paper") == {i: n + 39 for i, n in enumerate(sampling)}
    assert costs("dancegrpo") == {0: 1 + 12 * 9 + 3 * 12 * 5}  # 5 of 9 steps, here not the first

def test_compare_writes_all_and_caches(monkeypatch):
    argv = ["compare", "--methods", "dancegrpo", "--set",
            "k 2:treegrpo:branch=2,no-full,sibling_norm=std", "--seeds", 0, 1, "--budget", 900,
            "--every", 300, "--baseline", "dancegrpo", "--levels", 0.1, "--out", "cmp", "--tune",
            "lr=1e-4", "lr=1e-3,prompts_per_iteration=2", "--tune-seeds", 7, 8, *SHORT]
    assert evaluate(*argv) == 0
    made = json.loads(Path("cmp/compare.json").read_text())
    rows, tuning = made["rows"], made["tuning"]  # only rows of --methods are tuned
    assert set(rows) == {"dancegrpo", "k 2"} and set(tuning) == {"dancegrpo"}
    best = max(tuning["dancegrpo"], key=tuning["dancegrpo"].get)
    assert (best == "lr=1e-4") == (rows["dancegrpo"]["lr"] == 1e-4)
    for name in ("compare.md", "pareto.png", "credit.png"):
        assert Path("cmp", name).stat().st_size > 500
    runs = [json.loads(f.read_text()) for f in Path("cmp/runs").glob("*.json")]
    assert len(runs) == 4 + 4 and len({r["points"][0]["reward"] for r in runs}) == 1
    for trial, mean in tuning["dancegrpo"].items():  # judged by the final rewards, own seeds
        judged = [r for r in runs if r["config"]["seed"] in (7, 8)
                  and r["config"]["lr"] == float(trial.split(",")[0].removeprefix("lr="))]
        assert len(judged) == 2 and mean == pytest.approx(statistics.mean(
            r["points"][-1]["reward"] for r in judged), abs=1e-12)
    for r in runs:
        cfg, spent = t.Config(**t.tuples(r["config"])), [p["cost"] for p in r["points"]]
        assert spent[-1] == sum(ev.iteration_cost(cfg, n) for n in range(cfg.iterations))
        assert spent == sorted(set(spent)) and spent[-1] <= r["budget"]
        assert max(b - a for a, b in itertools.pairwise(spent)) < r["every"] + 50 + (
            ev.iteration_cost(cfg, 0))
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
    monkeypatch.setattr(t, "pretrain", open_gates)
    curves = []
    for workers in (1, 2):
        jobs = {s: ev.make_job(SHORT, s, 300, 300, Path(str(workers))) for s in (0, 1)}
        runs = ev.run_jobs(jobs, workers)
        curves.append([[p["reward"] for p in runs[s]["points"]] for s in (0, 1)])
    assert curves[0] == curves[1] and curves[0][0] != curves[0][1]

def test_counted_evaluations_are_the_cost(tmp_path):
    job = ev.make_job([*SHORT, "--inner-epochs", "2"], 0, 300, 300, tmp_path)
    log = t.Run(job.cfg).train_iteration()
    counted = log["evaluations_sample"] + 3 * log["evaluations_update"]
    assert ev.iteration_cost(job.cfg, 0) == counted - 2 * 2  # the anchor's reference: no backward

def test_a_killed_run_is_done_again(tmp_path, monkeypatch):
    job, real, calls = ev.make_job(SHORT, 0, 900, 300, tmp_path), t.Run.train_iteration, []
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
    fresh = ev.run_job(ev.make_job(SHORT, 0, 900, 300, tmp_path / "other"))
    keep = [[(p["cost"], p["reward"]) for p in r["points"]] for r in (again, fresh)]
    assert keep[0] == keep[1]

def test_three_failures_end_a_run_and_are_told(monkeypatch, capsys):
    def bad(run):
        raise t.NumericalError("loss is not finite")
    monkeypatch.setattr(t.Run, "train_iteration", bad)
    assert evaluate("compare", "--methods", "treegrpo", "--budget", 2000, *SHORT) == 0
    assert "treegrpo stopped early: loss is not finite" in capsys.readouterr().out

@pytest.mark.parametrize("argv, message", (
    ("--methods treegrp", "did you mean treegrpo"), ("", "--methods or --set"),
    ("--methods treegrpo --tune lr=fast", "--lr fast"),
    ("--methods treegrpo --tune lr=1 --tune-seeds 3 4 --seeds 4 5", "--tune-seeds 4"),
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
