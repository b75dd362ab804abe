#!/usr/bin/env python
"""TreeGRPO: reinforcement learning of diffusion and flow models in which denoising is a tree.

A text-to-image model denoises in T steps. Deterministic (ODE) steps are shared: all descendants
reuse the prefix. Stochastic (SDE) steps inside a window branch: a node gets k children that
differ in their noise only. The images at the leaves are rewarded, the rewards are backed up the
tree to one advantage per edge, and a clipped policy-gradient update trains the edges.

    repeat:
        steps = schedule(cfg, iteration)            # where to branch this time       (eq. 7)
        tree  = rollout(policy, prompts, steps)     # ODE prefix, k-ary window, ODE rest
        S     = rewards of the images at the leaves
        A     = leaf_advantages(S)                  # per prompt: (S - mean) / std    (eq. 9)
        A     = backup(tree, A)                     # mean of the edges below         (eq. 10, 11)
        A     = normalize_siblings(tree, A)         # an edge against its siblings
        update(policy, tree, A)                     # clipped surrogate on every edge (eq. 12)

One denoiser evaluation at a node serves all its k child edges: a tree of 27 leaves is trained
with 13 forward and backward passes where 27 separate trajectories of 10 steps need 243.

Papers: TreeGRPO (arXiv 2512.08153, "eq." below) and Dynamic-TreeRPO (arXiv 2509.23352, "D eq.").
Deviations, all undone by `--method treegrpo-paper`:
  - siblings are centred on the mean of the *other* siblings; the paper does not centre them;
  - children are averaged equally; the paper weights them by softmax of their log-probabilities,
    which differs by about 1/sqrt(2D) only when these are means over D latent dimensions;
  - the loss is the mean over edges; the paper sums them;
  - the steps after the window, which no advantage sees, are anchored at the reference model.

    python treegrpo.py                              # tiny model, no download, minutes on a CPU
    python treegrpo.py --model sd15                 # Stable Diffusion 1.5, LoRA, one GPU
    python treegrpo.py --method flow-grpo           # a flat baseline from the same code
    python treegrpo.py --reward my_file:my_function # fn(images (B,3,H,W) in [0,1], prompts) -> (B,)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import fcntl
import functools
import hashlib
import importlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

class UsageError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""

class NumericalError(Exception):
    """A value that is not finite: the update is skipped; three in a row stop the run.

    args: the message and, where known, the indices of the prompts it is about.
    """

class RewardError(Exception):
    """A reward function that raised, or did not return one float per image."""

def require(ok: bool, message: str, error: type[Exception] = UsageError) -> None:
    if not ok:
        raise error(message)

def allow(ok: bool, name: str, value, allowed) -> None:
    """UsageError about the value of a flag, unless ok; allowed: a text, or several names."""
    if not ok:
        names = [] if isinstance(allowed, str) else list(allowed)
        raise UsageError(f"--{name.replace('_', '-')} {value}: allowed are "
                         f"{', '.join(names) or allowed}{nearest(str(value), names)}")

def nearest(value: str, allowed) -> str:
    close = difflib.get_close_matches(value, list(allowed), 1)
    return f" (did you mean {close[0]}?)" if close else ""

@contextlib.contextmanager
def explained(what: str, *kinds: type[Exception], error: type[Exception] = UsageError):
    """Context in which errors of some kinds become one line that says what went wrong."""
    try:
        yield
    except kinds as e:
        raise error(f"{what}: {(str(e).splitlines() or [''])[0]} ({type(e).__name__})") from None

# ==== 1. Configuration: one frozen dataclass, from which the command line is made ===============
def opt(default, help, *, lo=None, hi=None, above=None, choices=None):
    """A field of Config with its help line and limits: lo <= value <= hi, value > above."""
    limits = {"help": help, "lo": lo, "hi": hi, "above": above, "choices": choices}
    return dataclasses.field(default=default, metadata=limits)

@dataclasses.dataclass(frozen=True)
class Config:
    # what is trained
    model: str = opt("tiny", "tiny, tiny-ddpm, sd15, sd3, flux, a hub id or a local folder")
    method: str = opt("treegrpo", "preset, a row of PRESETS; any other flag overrides it")
    reward: tuple[str, ...] = opt(("shapes",), "NAME[:WEIGHT] or MODULE:FUNCTION[:WEIGHT] ...")
    reward_weights: tuple[str, ...] = opt((), "local copies of reward models, NAME=FOLDER ...")
    prompts: str = opt("", "file of prompts, .txt or .jsonl (key 'prompt'); empty: built in")
    prompts_per_iteration: int = opt(8, "prompts per iteration, over all processes", lo=1)
    iterations: int = opt(150, "training iterations", lo=1)
    seed: int = opt(0, "seed of prompts, windows and noise", lo=0)
    out: str = opt("", "run folder; empty: runs/MODEL-METHOD-SEED")
    resume: str = opt("", "run folder to continue, bit for bit")
    overwrite: bool = opt(False, "replace the run in the run folder")
    device: str = opt("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = opt("fp32", "precision of frozen weights", choices=("fp32", "bf16", "fp16"))
    # the sampler
    steps: int = opt(10, "denoising steps T", lo=2)
    resolution: int = opt(16, "image side in pixels", lo=8)
    guidance: float = opt(1.0, "classifier-free guidance, in sampling and training", lo=1.0)
    sde: str = opt("flow", "SDE of flow models; others: DDIM", choices=("flow", "cps", "dance"))
    noise_level: float = opt(0.7, "noise level a of the window (DDIM, dance: eta)", above=0)
    noise_growth: float = opt(0.0, "beta: a grows to (1 + beta) a (D eq. 6)", above=-1)
    # the tree
    roots: int = opt(1, "initial noises per prompt", lo=1)
    branch: tuple[int, ...] = opt((3,), "children k per window step; the last repeats", lo=1)
    depth: int = opt(3, "window length w in steps; 0: all steps but the last", lo=0)
    window_mode: str = opt("random", "how the window's start is chosen",
                           choices=("random", "sliding", "fixed"))
    window_ratio: float = opt(0.5, "random: r of eq. 7; small favours early", above=0, hi=1)
    window_start: int = opt(0, "fixed, sliding: the (first) start", lo=0)
    window_stride: int = opt(1, "sliding: steps the start moves by", lo=1)
    window_every: int = opt(1, "sliding: iterations between moves", lo=1)
    tail_steps: int = opt(0, "ODE steps after the window; 0: those of the grid", lo=0)
    # credit
    group: str = opt("prompt", "leaves compared with each other", choices=("prompt", "root"))
    backup: str = opt("mean", "children's weights: equal, or eq. 11", choices=("mean", "prob"))
    sibling_norm: str = opt("center", "how an edge is compared with its siblings",
                            choices=("center", "std", "none", "depth"))
    adv_clip: float = opt(5.0, "advantages are clipped to +- this", above=0)
    # the update
    clip: float = opt(0.0256, "the ratio is clipped at 1 +- clip / sqrt(D)", above=0)
    clip_min: float = opt(0.0, "with clip-max: reward-conditioned clip (D eq. 11)", lo=0)
    clip_max: float = opt(0.0, "its upper end; 0: use clip", lo=0)
    clip_eta: float = opt(1.0, "its sensitivity to the advantage", lo=0)
    inner_epochs: int = opt(1, "optimiser steps per rollout, each on all of it", lo=1)
    train_fraction: float = opt(1.0, "share of the window trained, at random", above=0, hi=1)
    step_weight: str = opt("none", "weight of a step's loss", choices=("none", "std"))
    loss_reduce: str = opt("edges", "mean over edges, over leaves per layer, or sum (eq. 12)",
                           choices=("edges", "layer", "sum"))
    kl: float = opt(0.0, "weight of the KL divergence from the reference model", lo=0)
    anchor: float = opt(0.0, "weight of staying with the reference after the window", lo=0)
    sft: float = opt(0.0, "lambda: imitate the best path (D eq. 13)", lo=0)
    lr: float = opt(1e-3, "learning rate of AdamW", above=0)
    lr_schedule: str = opt("linear", "decay of the rate", choices=("constant", "linear", "cosine"))
    weight_decay: float = opt(0.01, "weight decay of AdamW", lo=0)
    max_grad_norm: float = opt(1.0, "gradients are clipped to this norm", above=0)
    ema: float = opt(0.0, "decay of the evaluated weight average; 0: off", lo=0, hi=0.9999)
    lora_rank: int = opt(32, "LoRA rank", lo=1)
    lora_alpha: int = opt(64, "LoRA alpha; the update is scaled by alpha / rank", lo=1)
    full: bool = opt(False, "train all weights of the denoiser instead of a LoRA")
    grad_checkpointing: bool = opt(False, "recompute activations: less memory, slower")
    micro_batch: int = opt(128, "most nodes per denoiser call; bounds memory only", lo=1)
    # bookkeeping
    eval_every: int = opt(10, "iterations between evaluations by the ODE sampler", lo=1)
    eval_images: int = opt(256, "images per evaluation, fixed prompts and noise", lo=1)
    save_every: int = opt(10, "iterations between checkpoints", lo=1)
    track: str = opt("", "MODULE:FUNCTION called with each line of the log, a dict")
    plan: bool = opt(False, "print what the run would do and cost, and stop")

    @property
    def window(self) -> int:  # its length w
        return self.depth or self.steps - 1

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{Path(self.model).name}-{self.method}-{self.seed}")

FLAT = {"branch": (1,), "depth": 0, "window_mode": "fixed", "sibling_norm": "none"}  # chains
PRESETS = {  # what the published methods do differently, as rows of one table (sources: README)
    "treegrpo": {"anchor": 1e-3},
    "treegrpo-paper": {"sibling_norm": "none", "backup": "prob", "loss_reduce": "sum"},
    "treegrpo-fast": {"anchor": 1e-3, "tail_steps": 2, "inner_epochs": 2},
    "dynamic-treerpo": {"branch": (2,), "depth": 4, "window_mode": "sliding", "noise_growth": 0.5,
                        "clip_min": 0.0128, "clip_max": 0.0512, "inner_epochs": 2, "sft": 0.001},
    "flow-grpo": FLAT | {"roots": 24, "kl": 0.04},
    "dancegrpo": FLAT | {"branch": (12, 1), "sde": "dance", "noise_level": 0.3,
                         "train_fraction": 0.6},
    "mixgrpo": {"branch": (12, 1), "depth": 4, "window_mode": "sliding", "window_every": 25,
                "sibling_norm": "none"},
    "branchgrpo": FLAT | {"branch": (2, 1, 1, 2, 1, 1, 2, 1, 1, 2, 1), "steps": 20, "sde": "dance",
                          "noise_level": 0.3, "sibling_norm": "depth", "clip": 0.256},
    "tempflow-grpo": {"roots": 4, "branch": (6,), "depth": 1, "group": "root",
                      "step_weight": "std", "sibling_norm": "none"},
    "ddpo": FLAT | {"roots": 24, "noise_level": 1.0}}

def check_range(name: str, value, limits) -> None:
    """One line for a value outside the limits given to `opt`."""
    lo, hi, above, choices = (limits[k] for k in ("lo", "hi", "above", "choices"))
    bounds = ((">", above), (">=", lo), ("<=", hi))
    text = " and ".join(f"{sign} {limit}" for sign, limit in bounds if limit is not None)
    for v in value if isinstance(value, tuple) else (value,):
        require(v not in (math.inf, -math.inf), f"--{name.replace('_', '-')} {v}: must be finite")
        allow(not choices or v in choices, name, v, choices or ())
        ok = (above is None or v > above) and (lo is None or v >= lo) and (hi is None or v <= hi)
        require(ok, f"--{name.replace('_', '-')} {v}: must be {text}")  # NaN is neither

def check_config(cfg: Config) -> None:
    """Refuse what cannot work, before any model is loaded."""
    for f in dataclasses.fields(cfg):
        check_range(f.name, getattr(cfg, f.name), f.metadata)
    T, w, branch = cfg.steps, cfg.window, " ".join(map(str, cfg.branch))
    allow(w < T, "depth", w, f"0 to {T - 1}, as the last step has no noise")
    allow(cfg.window_start < T - w, "window-start", cfg.window_start, f"0 to {T - w - 1}")
    allow(len(cfg.branch) <= w, "branch", branch, f"1 to {w} values (--depth)")
    steps = schedule(cfg, 0)
    leaves = math.prod(s.children for s in steps) * (cfg.roots if cfg.group == "prompt" else 1)
    require(leaves > 1, f"--branch {branch} with --roots {cfg.roots} --group {cfg.group}: a group "
            "of one leaf has nothing to be compared with; 2 or more are needed")
    sde, most = "ddim" if is_ddim(cfg.model) else cfg.sde, max(s.noise for s in steps)
    require(sde in ("flow", "dance") or most < 1 + 1e-9, f"--noise-level {cfg.noise_level} with "
            f"--noise-growth {cfg.noise_growth}: reaches {most:.3g}; {sde} allows at most 1")
    allow(cfg.clip_min <= cfg.clip_max, "clip-min", cfg.clip_min, f"0 to --clip-max {cfg.clip_max}")
    pick_device(cfg.device)
    training_prompts(cfg)
    functions = [("--reward", name) for name, _ in map(parse_reward, cfg.reward) if ":" in name]
    for flag, name in functions + [("--track", cfg.track)] * bool(cfg.track):
        load_function(flag, name)
    if not cfg.plan:
        FAMILIES[family(cfg.model)][0].latent_shape(cfg)

# ==== 2. Schedule: one list of steps expresses every method =====================================
@dataclasses.dataclass(frozen=True)
class Step:
    """A denoising step from grid point i to grid point j > i."""
    i: int
    j: int
    children: int = 1  # k, samples drawn per node
    noise: float = 0.0  # noise level a; 0: deterministic, then children = 1
    train: bool = False

def stream(*key) -> random.Random:
    """A random stream of its own for each key, the same on every machine."""
    return random.Random("/".join(map(str, key)))

def window_probs(T: int, w: int, r: float) -> Tensor:
    """Pr[start = i] = (1 - r) r^i / (1 - r^(T-w)), i = 0 .. T-w-1 (eq. 7) -> (T-w,) float64."""
    p = torch.tensor(r, dtype=torch.float64) ** torch.arange(T - w)
    return p / p.sum()

def window_start(cfg: Config, iteration: int) -> int:
    """First step of the window."""
    starts = cfg.steps - cfg.window
    if cfg.window_mode == "random":
        probs = window_probs(cfg.steps, cfg.window, cfg.window_ratio).tolist()
        return stream(cfg.seed, iteration, "window").choices(range(starts), probs)[0]
    moves = iteration // cfg.window_every if cfg.window_mode == "sliding" else 0
    return (cfg.window_start + moves * cfg.window_stride) % starts

def schedule(cfg: Config, iteration: int) -> list[Step]:
    """ODE prefix, stochastic window, ODE rest. The last step is always deterministic."""
    T, w, start = cfg.steps, cfg.window, window_start(cfg, iteration)
    trained = stream(cfg.seed, iteration, "train").sample(
        range(w), max(1, round(cfg.train_fraction * w)))
    steps = ode_steps(range(start + 1))
    for n in range(w):
        noise = cfg.noise_level * (1 + cfg.noise_growth * n / max(w - 1, 1))  # a g(n), D eq. 6
        k = cfg.branch[min(n, len(cfg.branch) - 1)]
        steps.append(Step(start + n, start + n + 1, k, noise, n in trained))
    rest = T - start - w
    tail = min(cfg.tail_steps or rest, rest)
    return steps + ode_steps([start + w + round(rest * m / tail) for m in range(tail + 1)])

def ode_steps(points) -> list[Step]:
    """Deterministic steps through the given grid points."""
    return [Step(i, j) for i, j in zip(points, points[1:], strict=False)]

def nfe(steps: list[Step], roots: int = 1, inner_epochs: int = 1, kl=False, anchor=False):
    """Denoiser evaluations per prompt (to sample, to train); double under guidance."""
    nodes, sample, train = roots, 0, 0
    for step in steps:
        sample, train, nodes = sample + nodes, train + nodes * step.train, nodes * step.children
    return sample, inner_epochs * (train * (2 if kl else 1) + bool(anchor)) + bool(anchor)

def forward_equivalents(steps: list[Step], cfg: Config) -> int:
    """Cost per prompt in forward passes; a backward pass counts as two."""
    sample, train = nfe(steps, cfg.roots)
    epoch = train * (4 if cfg.kl else 3) + 3 * bool(cfg.anchor)
    return sample + cfg.inner_epochs * epoch + bool(cfg.anchor)  # the reference, once

# ==== 3. Samplers: mean and std of one step. Pure; float32 or float64 in, the same out ==========
# x latent, v velocity (noise - data), sigma from 1 (noise) to 0, alpha the cumulative one of DDPM

def scalars(x: Tensor, *values) -> list[Tensor]:
    """Python floats or 0-d tensors -> 0-d CPU tensors of x's precision."""
    return [torch.as_tensor(v, dtype=x.dtype, device="cpu") for v in values]

def flow_sde_step(x, v, sigma, sigma_next, noise_level, sigma_cap) -> tuple[Tensor, Tensor]:
    """SDE with the marginals of the flow ODE; noise_level 0 is the Euler step exactly.
    x, v (N, ...), sigma > sigma_next -> mean (N, ...), std (). sigma_cap is the grid's second
    sigma: it removes the singularity of the rate at sigma = 1. Flow-GRPO (arXiv 2505.05470).
    """
    sigma, sigma_next, a, cap = scalars(x, sigma, sigma_next, noise_level, sigma_cap)
    dt = sigma_next - sigma  # < 0
    rate = a * (sigma / (1 - torch.minimum(sigma, cap))).sqrt()
    pull = rate**2 / (2 * sigma)
    mean = x * (1 + pull * dt) + v * ((1 + pull * (1 - sigma)) * dt)
    return mean, rate * (-dt).sqrt()

def dance_sde_step(x, v, sigma, sigma_next, eta) -> tuple[Tensor, Tensor]:
    """SDE of constant rate eta; shapes as above. Source: DanceGRPO (arXiv 2505.07818)."""
    sigma, sigma_next, eta = scalars(x, sigma, sigma_next, eta)
    dt = sigma_next - sigma
    x0 = x - sigma * v
    score = -(x - (1 - sigma) * x0) / sigma**2
    return x + v * dt - 0.5 * eta**2 * score * dt, eta * (-dt).sqrt()

def cps_step(x, v, sigma, sigma_next, noise_level) -> tuple[Tensor, Tensor]:
    """Coefficients-preserving sampling: part of the next noise is drawn anew; noise_level <= 1.
    Exact on a point mass. The std does not shrink with the step, so the marginals of a denoiser
    that predicts posterior means come out too narrow: for data N(0, .5^2) and noise level .7 by
    26 % at 10 steps, by 15 % at 640. Source: arXiv 2509.05952.
    """
    sigma, sigma_next, a = scalars(x, sigma, sigma_next, noise_level)
    std = sigma_next * torch.sin(a * (math.pi / 2))
    x0, x1 = x - sigma * v, x + (1 - sigma) * v  # predicted data and noise
    return (1 - sigma_next) * x0 + (sigma_next**2 - std**2).clamp(min=0).sqrt() * x1, std

def ddim_step(x, eps, alpha, alpha_next, eta) -> tuple[Tensor, Tensor]:
    """eta 0: deterministic; eta 1: DDPM; eta <= 1. Source: DDIM (arXiv 2010.02502, eq. 12, 16)."""
    alpha, alpha_next, eta = scalars(x, alpha, alpha_next, eta)
    x0 = (x - (1 - alpha).sqrt() * eps) / alpha.sqrt()
    std = eta * ((1 - alpha_next) / (1 - alpha) * (1 - alpha / alpha_next)).sqrt()
    return alpha_next.sqrt() * x0 + (1 - alpha_next - std**2).clamp(min=0).sqrt() * eps, std

def gaussian_log_prob(sample, mean, std, reduce: str = "mean") -> Tensor:
    """log N(sample; mean, std^2) -> (N,): its *mean* over the D dimensions, or their sum.
    The mean is the field's convention. The ratio formed from it is the D-th root of the true
    one, which is why clip ranges are tiny and scale as 1 / sqrt(D).
    """
    log_prob = -(((sample - mean) / std) ** 2) / 2 - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return log_prob.flatten(1).mean(1) if reduce == "mean" else log_prob.flatten(1).sum(1)

def gaussian_kl(mean, mean_ref, std) -> Tensor:
    """KL(N(mean, std^2) || N(mean_ref, std^2)), mean over dimensions -> (N,)."""
    return ((mean - mean_ref) ** 2).flatten(1).mean(1) / (2 * std**2)

# ==== 4. Tree and rollout =======================================================================
@dataclasses.dataclass
class Level:
    """One stochastic step of all prompts: N nodes, E edges, all float32 on the CPU."""
    step: Step
    x: Tensor  # (N, C, H, W) latents where the step starts; node n hangs from edge n above
    pred: Tensor  # (N, C, H, W) the network's output there, in the rollout
    prompt: Tensor  # (N,) index of the prompt
    parent: Tensor  # (E,) the node an edge leaves
    sample: Tensor  # (E, C, H, W) latents where the edge ends
    log_prob_old: Tensor  # (E,)
    std: Tensor  # () of the step's noise

@dataclasses.dataclass
class Tree:
    """The trees of all prompts. They may be irregular, and siblings need not be adjacent."""
    levels: list[Level]
    leaves: Tensor  # (L, C, H, W) final latents; leaf n hangs from edge n of the last level
    prompt: Tensor  # (L,) prompt of each leaf
    root: Tensor  # (L,) root of each leaf
    noise: Tensor  # (R, C, H, W) initial latents of the roots

    def groups(self, kind: str) -> Tensor:
        """Group in which each leaf is compared, kind "prompt" or "root" -> (L,)."""
        return self.root if kind == "root" else self.prompt

    def path(self, leaf: int) -> list[int]:
        """Edges from the root to a leaf, one per level."""
        edges = [leaf]
        for level in reversed(self.levels[1:]):
            edges.append(int(level.parent[edges[-1]]))
        return edges[::-1]

    def children(self, node: tuple[int, int]) -> list[int]:
        """Edges that leave node = (level, index)."""
        return (self.levels[node[0]].parent == node[1]).nonzero().flatten().tolist()

def node_batches(nodes: int, parent: Tensor, micro_batch: int):
    """Yield (slice of nodes, their edges (e,), the node within the slice of each (e,))."""
    for start in range(0, nodes, micro_batch):
        stop = min(start + micro_batch, nodes)
        edges = ((parent >= start) & (parent < stop)).nonzero().flatten()
        yield slice(start, stop), edges, parent[edges] - start

def tree_noise(key: tuple, slots: list[int], shape: tuple):
    """draw(level, sorted prompt index (N,)) -> noise (N, *shape), the same on every machine."""
    def draw(level: int, prompt: Tensor) -> Tensor:
        blocks = []
        for p in prompt.unique().tolist():
            g = torch.Generator().manual_seed(stream(*key, slots[p], level).getrandbits(63))
            blocks.append(torch.randn(int((prompt == p).sum()), *shape, generator=g))
        return torch.cat(blocks)
    return draw

def transition(policy, x, prompt, step: Step, cond) -> tuple[Tensor, Tensor, Tensor]:
    """One denoiser evaluation per node, for all its children -> pred, mean (N, C, H, W), std ()."""
    x = x.to(policy.device)
    pred = policy.predict(x, step.i, {k: v[prompt].to(policy.device) for k, v in cond.items()})
    return pred, *policy.step(x, pred, step.i, step.j, step.noise)

@torch.no_grad()
def rollout(policy, cond, prompt: Tensor, steps: list[Step], draw, micro_batch: int) -> Tree:
    """Grow the trees of all prompts, level by level; with ODE steps only, a plain sampler.
    cond: dict of tensors (P, ...); prompt (R,): prompt of each root, sorted; draw: `tree_noise`.
    """
    x = start = draw(0, prompt)
    root, levels = torch.arange(len(prompt)), []
    for step in steps:
        parent = torch.arange(len(x)).repeat_interleave(step.children)
        noise = draw(len(levels) + 1, prompt[parent]) if step.noise else None
        preds, samples, log_probs = [], [], []
        for nodes, edges, local in node_batches(len(x), parent, micro_batch):
            pred, mean, std = transition(policy, x[nodes], prompt[nodes], step, cond)
            check_finite("denoiser output", pred, step.i, prompt[nodes])
            sample = mean[local]
            if step.noise:
                require(std > 0, f"std {std:.3g} at step {step.i}, noise {step.noise}",
                        NumericalError)
                sample = sample + std * noise[edges].to(policy.device)
                log_probs.append(gaussian_log_prob(sample, mean[local], std).cpu())
            check_finite("latents", sample, step.i, prompt[nodes][local])
            preds.append(pred.cpu())
            samples.append(sample.cpu())
        samples = torch.cat(samples)
        if step.noise:
            levels.append(Level(step, x, torch.cat(preds), prompt, parent, samples,
                                torch.cat(log_probs), std))
        x, prompt, root = samples, prompt[parent], root[parent]
    return Tree(levels, x, prompt, root, start)

def check_finite(what: str, value: Tensor, step: int, prompt: Tensor) -> None:
    """value (N, ...); prompt (N,): index of each row's prompt."""
    bad = ~value.isfinite().flatten(1).all(1).cpu()
    if bad.any():
        raise NumericalError(f"{what} is not finite at step {step}", prompt[bad].unique().tolist())

@contextlib.contextmanager
def naming(prompts: list[str]):
    """Context in which a NumericalError that knows its prompts by index tells their text."""
    try:
        yield
    except NumericalError as e:
        message, *rows = e.args
        names = ", ".join(repr(prompts[p]) for p in rows[0][:3]) if rows else ""
        raise NumericalError(message + (f" for {names}" if names else "")) from None

# ==== 5. Credit: rewards of leaves -> one advantage per edge. Pure functions of a tree ==========
MIN_SPREAD = 1e-6  # below this spread a group tells nothing: its advantages are exactly 0

def group_stats(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population std and size of each value's group; values, groups (n,) -> 3 x (n,)."""
    zeros = values.new_zeros(int(groups.max()) + 1)
    count = zeros.index_add(0, groups, torch.ones_like(values))
    mean = zeros.index_add(0, groups, values) / count
    var = zeros.index_add(0, groups, (values - mean[groups]) ** 2) / count
    return mean[groups], var.sqrt()[groups], count[groups]

def leaf_advantages(rewards: Tensor, groups: Tensor, weights=(1.0,)) -> Tensor:
    """(S - mean) / std within each group (eq. 9) -> (L,); 0 where there is no spread.
    rewards (L,) or (R, L): several are normalised one by one, then weighted and added.
    groups (L,): group index of each leaf; a group of one is refused (ValueError).
    """
    rewards, total = rewards.reshape(-1, rewards.shape[-1]), 0.0
    for w, r in zip(weights, rewards, strict=True):
        mean, std, count = group_stats(r, groups)
        require((count > 1).all(), "a group of one leaf: 2 or more are needed", ValueError)
        least = MIN_SPREAD * mean.abs().clamp(min=1)  # float32 rounds to about 1e-7 of the mean
        total = total + w * torch.where(std < least, 0, (r - mean) / std.clamp(min=MIN_SPREAD))
    return total

def child_weights(level: Level, mode: str) -> Tensor:
    """Weights of siblings, 1 in sum: equal, or softmax of their log-probs (eq. 11) -> (E,)."""
    n, parent = len(level.x), level.parent
    score = level.log_prob_old if mode == "prob" else torch.zeros_like(level.log_prob_old)
    top = score.new_full((n,), -math.inf).scatter_reduce(0, parent, score, "amax")
    w = (score - top[parent]).exp()
    return w / w.new_zeros(n).index_add(0, parent, w)[parent]

def backup(tree: Tree, leaf_adv: Tensor, weights: str = "mean") -> list[Tensor]:
    """Advantage of every edge, the weighted mean of those below it (eq. 10) -> per level (E,)."""
    value, adv = leaf_adv, []
    for level in reversed(tree.levels):
        adv.append(value)
        weighted = child_weights(level, weights).to(value) * value
        value = value.new_zeros(len(level.x)).index_add(0, level.parent, weighted)
    return adv[::-1]

def normalize_siblings(tree: Tree, adv: list[Tensor], mode: str = "center") -> list[Tensor]:
    """Compare each edge with its siblings -> per level (E,).
    none    the paper: the backed-up value as it is
    center  A - mean of the other siblings = k/(k-1) (A - mean): unbiased
    std     zero mean, unit population std (at k = 2 only the sign is left)
    depth   zero mean, unit std over the prompt's edges at that depth
    A group of one keeps its value (so chains are flat GRPO); a spread below 1e-6 gives 0.
    """
    if mode == "none":
        return adv
    out = []
    for level, a in zip(tree.levels, adv, strict=True):
        siblings = level.prompt[level.parent] if mode == "depth" else level.parent
        mean, std, k = group_stats(a, siblings)
        scale = k / (k - 1).clamp(min=1) if mode == "center" else 1 / std.clamp(min=MIN_SPREAD)
        out.append(torch.where(k == 1, a, torch.where(std < MIN_SPREAD, 0, (a - mean) * scale)))
    return out

def edge_advantages(tree: Tree, rewards: Tensor, cfg: Config, weights=(1.0,)) -> list[Tensor]:
    """Backup, then normalisation among siblings; rewards (L,) or (R, L) -> per level (E,)."""
    leaf = leaf_advantages(rewards, tree.groups(cfg.group), weights)
    adv = normalize_siblings(tree, backup(tree, leaf, cfg.backup), cfg.sibling_norm)
    return [a.clamp(-cfg.adv_clip, cfg.adv_clip) for a in adv]

# ==== 6. Clipped update =========================================================================
def clipped_surrogate(log_prob, log_prob_old, adv, clip) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A), rho = exp(log_prob - log_prob_old) (eq. 12).
    All (E,); clip a float or one per edge. Returns the loss per edge, and per edge the ratio and
    whether the clip stopped its gradient, on the low or the high side.
    """
    ratio = (log_prob - log_prob_old).exp()
    loss = -torch.minimum(ratio * adv, torch.clamp(ratio, 1 - clip, 1 + clip) * adv)
    return loss, {"ratio": ratio.detach(), "clip_low": (ratio < 1 - clip) & (adv < 0),
                  "clip_high": (ratio > 1 + clip) & (adv > 0)}

def clip_range(cfg: Config, adv: Tensor, dims: int):
    """Clip range of each edge for latents of `dims` values, which scale it by 1 / sqrt(dims).
    With clip_max, min + (max - min) sigmoid(eta A) (D eq. 11; the sigmoid is our choice).
    """
    width = (cfg.clip_max - cfg.clip_min) * torch.sigmoid(cfg.clip_eta * adv)
    return (cfg.clip_min + width if cfg.clip_max else cfg.clip) / math.sqrt(dims)

def edge_weights(tree: Tree, cfg: Config) -> list[Tensor]:
    """Weight of each edge's loss, over the total of all processes -> per level (E,).
    edges: alike; layer: an edge's number of leaves; sum: alike, total = number of prompts.
    """
    share, out = torch.ones(len(tree.leaves)), []
    for level in reversed(tree.levels):
        w = share if cfg.loss_reduce == "layer" else torch.ones_like(share)
        out.append(w * (level.std.item() if cfg.step_weight == "std" else 1.0) * level.step.train)
        share = torch.zeros(len(level.x)).index_add(0, level.parent, share)
    prompts = torch.tensor(float(len(tree.prompt.unique())))
    total = prompts if cfg.loss_reduce == "sum" else sum(w.sum() for w in out)
    return [w / all_sum(total) for w in out[::-1]]

def layer_tuning(tree: Tree, leaf_adv: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per level the node on the best path that each node imitates (N,), and its weight (N,).
    LayerTuning (D eq. 13): a prompt's best path ends at its first best leaf, whose advantage is
    the weight (our choice), 0 for the best nodes. The target is the network's output there in the
    rollout. The weights give a mean over a trained level's other nodes, and over these levels.
    """
    best = [max((tree.prompt == p).nonzero().flatten().tolist(), key=lambda n: leaf_adv[n].item())
            for p in range(int(tree.prompt.max()) + 1)]
    paths = torch.tensor([tree.path(leaf) for leaf in best])  # (P, levels)
    out = []
    for n, level in enumerate(tree.levels):
        target = level.parent[paths[:, n]][level.prompt]
        other = (target != torch.arange(len(target))) * float(level.step.train)
        out.append((target, other * leaf_adv[best][level.prompt], other.sum()))
    count = all_sum(torch.stack([c for _, _, c in out])).clamp(min=1)
    trained = sum(level.step.train for level in tree.levels)
    return [(target, w / c / trained) for (target, w, _), c in zip(out, count, strict=True)]

@torch.no_grad()
def anchor_level(policy, tree: Tree, cond, cfg: Config, iteration: int) -> Level:
    """A level without edges: one leaf of each prompt, noised to a grid point after the window,
    and the reference's output there, to be imitated.
    The window's advantages cannot see the steps after it, for siblings share them, and yet its
    updates move them, for all steps share the weights.
    """
    i = stream(cfg.seed, iteration, "anchor").randrange(tree.levels[-1].step.j, cfg.steps)
    step, none = Step(i, i + 1, train=True), torch.arange(0)
    leaf = torch.tensor([int((tree.prompt == p).nonzero()[0]) for p in tree.prompt.unique()])
    x, prompt = policy.noised(tree.leaves[leaf], tree.noise[tree.root[leaf]], i), tree.prompt[leaf]
    with policy.reference():
        pred = [transition(policy, x[rows], prompt[rows], step, cond)[0].cpu()
                for rows, *_ in node_batches(len(x), none, cfg.micro_batch)]
    return Level(step, x, torch.cat(pred), prompt, none, x[:0], x.new_zeros(0), x.new_zeros(()))

def micro_batch_loss(policy, level: Level, batch, cond, cfg: Config, adv, weight, imitate=None):
    """Loss of the edges of some nodes: a scalar, and statistics per edge.
    imitate: per node of the level the node whose stored output it imitates, and its weight.
    """
    nodes, edges, local = batch
    here = level.x[nodes], level.prompt[nodes], level.step, cond
    if cfg.kl:
        with torch.no_grad(), policy.reference():
            ref = transition(policy, *here)[1]
    pred, mean, std = transition(policy, *here)  # the rollout's own call: rho = 1 at first
    sample, old, adv, weight = (t[edges].to(mean.device) for t in
                                (level.sample, level.log_prob_old, adv, weight))
    log_prob = gaussian_log_prob(sample, mean[local], std)
    loss, stats = clipped_surrogate(log_prob, old, adv, clip_range(cfg, adv, pred[0].numel()))
    if cfg.kl:
        stats["kl"] = gaussian_kl(mean, ref, std)[local]
        loss = loss + cfg.kl * stats["kl"]
    check_finite("loss", loss[:, None], level.step.i, level.prompt[level.parent[edges]])
    loss = (weight * loss).sum()
    if imitate:
        target, lead = (t[nodes] for t in imitate)
        gap = ((pred - level.pred[target].to(pred.device)) ** 2).flatten(1).mean(1)
        loss = loss + (lead.to(gap.device) * gap).sum()
    return loss, stats

LOSS_SCALE = 2.0**12  # keeps fp16 gradients from underflow; a power of two is exact in fp32

def accumulate_gradients(policy, levels: list[Level], adv, cond, cfg: Config, weights, imitate):
    """One backward pass per micro-batch of nodes; they add up to LOSS_SCALE x the gradient."""
    parts = []
    for level, *targets in zip(levels, adv, weights, imitate, strict=True):
        for batch in node_batches(len(level.x), level.parent, cfg.micro_batch):
            if level.step.train:
                loss, stats = micro_batch_loss(policy, level, batch, cond, cfg, *targets)
                (loss * LOSS_SCALE).backward()
                norm = nn.utils.get_total_norm([p.grad for p in policy.trainable
                                                if p.grad is not None])
                rows = level.prompt[batch[0]]
                check_finite("gradient", norm.expand(len(rows), 1), level.step.i, rows)
                parts.append({k: v.detach().float().cpu() for k, v in stats.items()})
    return {k: torch.cat([p[k] for p in parts]) for k in parts[0]}

def update(policy, tree: Tree, adv, leaf_adv, cond, cfg: Config, optimizer, iteration=0):
    """`inner_epochs` optimiser steps on one rollout -> list of the statistics of each."""
    levels, weights, imitate, log = tree.levels, edge_weights(tree, cfg), [None] * len(adv), []
    if cfg.sft:
        imitate = [(target, cfg.sft * lead) for target, lead in layer_tuning(tree, leaf_adv)]
    if cfg.anchor:
        levels = [*levels, anchor_level(policy, tree, cond, cfg, iteration)]
        nodes, none = len(levels[-1].x), torch.zeros(0)
        share = torch.full((nodes,), cfg.anchor) / all_sum(torch.tensor(float(nodes)))
        adv, weights = [*adv, none], [*weights, none]
        imitate = [*imitate, (torch.arange(nodes), share)]
    for _ in range(cfg.inner_epochs):
        optimizer.zero_grad(set_to_none=False)
        stats = together(accumulate_gradients, policy, levels, adv, cond, cfg, weights, imitate)
        for p in policy.trainable:
            p.grad = all_sum(torch.zeros_like(p) if p.grad is None else p.grad / LOSS_SCALE)
        norm = nn.utils.clip_grad_norm_(policy.trainable, cfg.max_grad_norm)
        optimizer.step()
        off, spread = (stats["ratio"] - 1).abs().max(), stats["ratio"].std(correction=0)
        log.append({k: v.mean().item() for k, v in stats.items()} | {
            "ratio_std": spread.item(), "ratio_max": off.item(), "grad_norm": norm.item()})
    return log

# ==== 7. Many processes (torchrun): every rank grows the trees of its own prompts ===============
def join_processes(ends: contextlib.ExitStack) -> None:
    """Join the processes that torchrun started, each with its own GPU, until `ends` closes."""
    if "LOCAL_RANK" in os.environ and not torch.distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group()
        ends.callback(torch.distributed.destroy_process_group)

def world() -> tuple[int, int]:
    """(rank, number of processes)."""
    dist = torch.distributed
    ready = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)

def all_sum(value: Tensor) -> Tensor:
    """Sum over the processes."""
    if world()[1] > 1:
        value = value.clone()
        torch.distributed.all_reduce(value)
    return value

def merge_logs(log: dict, prompts: int) -> dict:
    """One log of all processes: means over prompts, but sums of evaluations, and maxima."""
    rank, size = world()
    if size == 1:
        return log
    rows = torch.zeros(size, 1 + len(log), dtype=torch.float64)
    rows[rank] = torch.tensor([prompts, *log.values()], dtype=torch.float64)
    share, rows = all_sum(rows).split([1, len(log)], 1)
    mean, total, most = (share / share.sum() * rows).sum(0), rows.sum(0), rows.amax(0)
    how = {"evaluations": total, "ratio_max": most, "memory": most, "seconds": most}
    return {k: next((v for name, v in how.items() if k.startswith(name)), mean)[n].item()
            for n, k in enumerate(log)}

def together(function, *args):
    """Call; a NumericalError on one rank is raised on all, so that none waits for another."""
    result, error = None, None
    try:
        result = function(*args)
    except NumericalError as e:
        error = e
    if all_sum(torch.tensor(float(error is not None))) > 0:
        raise error or NumericalError("another process met a value that is not finite")
    return result

# ==== 8. Models. A policy is what the method needs from a model =================================
class Policy:
    """Protocol and shared parts. A subclass sets
    kind       what the network predicts: "flow" (velocity), "eps" or "v"
    grid       (T+1,) float32 from noise to data: sigma for flow, cumulative alpha otherwise
    shape      (C, H, W) of the latents; guided: whether guidance doubles the batch
    trainable  float32 parameters, `initial` their untrained values; cfg; device

    and defines encode(prompts) -> dict of tensors (P, ...), under guidance (P, 2, ...) with the
    unconditional one first; denoise(x, i, cond) -> network output (N, C, H, W) for latents x at
    grid point i; decode(latents) -> images (B, 3, H, W) in [0, 1]; export, restore (folder).
    """
    evaluations = 0  # latents the denoiser has seen, twice under guidance

    def predict(self, x: Tensor, i: int, cond: dict[str, Tensor]) -> Tensor:
        """Network output with classifier-free guidance -> (N, C, H, W) float32."""
        self.evaluations += len(x) * (2 if self.guided else 1)
        if not self.guided:
            return self.denoise(x, i, cond).float()
        both = {k: v.transpose(0, 1).flatten(0, 1) for k, v in cond.items()}
        uncond, text = self.denoise(torch.cat([x, x]), i, both).float().chunk(2)
        return uncond + self.cfg.guidance * (text - uncond)

    def step(self, x: Tensor, pred: Tensor, i: int, j: int, noise: float) -> tuple[Tensor, Tensor]:
        """Mean (N, C, H, W) and std () of the latents at grid point j."""
        now, then = self.grid[i], self.grid[j]
        if self.kind != "flow":
            eps = pred if self.kind == "eps" else now.sqrt() * pred + (1 - now).sqrt() * x
            return ddim_step(x, eps, now, then, noise)
        if noise == 0 or self.cfg.sde == "flow":
            return flow_sde_step(x, pred, now, then, noise, self.grid[1])
        return {"cps": cps_step, "dance": dance_sde_step}[self.cfg.sde](x, pred, now, then, noise)

    def denoised(self, x: Tensor, pred: Tensor, i: int) -> Tensor:
        """Predicted clean latents (N, C, H, W)."""
        a = self.grid[i]
        if self.kind == "flow":
            return x - a * pred
        scaled = (1 - a).sqrt() * pred
        return (x - scaled) / a.sqrt() if self.kind == "eps" else a.sqrt() * x - scaled

    def noised(self, x: Tensor, noise: Tensor, i: int) -> Tensor:
        """Clean latents x with the noise of grid point i -> (N, C, H, W)."""
        a = self.grid[i]
        signal, blur = (1 - a, a) if self.kind == "flow" else (a.sqrt(), (1 - a).sqrt())
        return signal * x + blur * noise

    def reference(self):
        """Context in which the denoiser is the untrained one."""
        return swapped(self.trainable, self.initial)

@contextlib.contextmanager
def swapped(parameters: list[nn.Parameter], values: list[Tensor]):
    """Context in which the parameters hold other values."""
    kept = [p.data for p in parameters]
    try:
        for p, v in zip(parameters, values, strict=True):
            p.data = v
        yield
    finally:
        for p, v in zip(parameters, kept, strict=True):
            p.data = v

# ---- the tiny world: captions "a red circle", 16 x 16 pixels; its base is trained at first use
COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.7, 0.2), "blue": (0.15, 0.25, 0.9),
           "yellow": (0.95, 0.8, 0.1)}
SHAPES = ("circle", "square", "triangle", "cross")
CAPTIONS = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
PLACES = [(y, x) for y in (6, 10) for x in (6, 10)]  # centres
BASE = {"width": 96, "blocks": 3, "heads": 4, "patch": 4, "wrong": 0.45, "steps": 1500,
        "batch": 64, "lr": 1e-2}

def draw_caption(caption: str) -> Tensor:
    """Clean drawings of a caption at every place -> (4, 3, 16, 16) in [0, 1]."""
    _, colour, shape = caption.split()
    line, (cy, cx) = torch.arange(16) + 0.5, torch.tensor(PLACES).mT[:, :, None, None]
    y, x = line[:, None] - cy, line - cx  # (4, 16, 1), (4, 1, 16)
    far, near = torch.maximum(y.abs(), x.abs()), torch.minimum(y.abs(), x.abs())
    mask = {"circle": y**2 + x**2 < 30, "square": far < 5, "cross": (near < 1.6) & (far < 5.5),
            "triangle": (x.abs() < (y + 6) / 2) & (y.abs() < 5.5)}[shape]
    return torch.where(mask[:, None], torch.tensor(COLOURS[colour]).view(3, 1, 1), 0.97)

def caption_words(captions: list[str]) -> Tensor:
    names = [*COLOURS, *SHAPES]
    return torch.tensor([[names.index(word) for word in c.split()[1:]] for c in captions])

class Block(nn.Module):
    """Transformer block whose normalisation is modulated by the condition (DiT, adaLN-zero)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.ada = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x, c):  # x (N, L, W), c (N, W)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c))[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1))
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))  # (N, heads, L, W / heads)
        x = x + gate1 * self.out(y.transpose(1, 2).flatten(2))
        return x + gate2 * self.down(F.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))

class TinyDiT(nn.Module):
    """Diffusion transformer on 4 x 4 patches, conditioned on time and a caption's two words."""

    def __init__(self, width: int, blocks: int, heads: int, patch: int):
        super().__init__()
        self.patch, self.side = patch, 16 // patch
        self.embed = nn.Linear(3 * patch**2, width)
        self.place = nn.Parameter(torch.randn(self.side**2, width))
        self.words = nn.Embedding(len(COLOURS) + len(SHAPES), width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, 3 * patch**2)

    def forward(self, x, time, words):  # (N, 3, 16, 16), time (N,) in [0, 1], words (N, 2)
        phase = time[:, None] * torch.logspace(0, 1.5, self.place.shape[1] // 2, device=x.device)
        c = self.time(torch.cat([phase.cos(), phase.sin()], 1)) + self.words(words).sum(1)
        h = self.embed(F.pixel_unshuffle(x, self.patch).flatten(2).mT) + self.place
        for block in self.blocks:
            h = block(h, c)
        h = self.head(F.layer_norm(h, h.shape[-1:])).mT.unflatten(2, (self.side, self.side))
        return F.pixel_shuffle(h, self.patch)

def ddpm_alphas() -> Tensor:
    """Cumulative alphas of Stable Diffusion 1.5's noise schedule -> (1000,)."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0).float()

def pretrain(kind: str, net: TinyDiT) -> None:
    """Train the tiny base; 45 % of its captions are wrong, as many captions on the web are."""
    from tqdm import tqdm
    gen, n, batch = torch.Generator().manual_seed(0), len(CAPTIONS), BASE["batch"]
    images = torch.stack([draw_caption(c) for c in CAPTIONS]) * 2 - 1  # (16, 4, 3, 16, 16)
    words, alphas = caption_words(CAPTIONS), ddpm_alphas()
    optimizer = torch.optim.AdamW(net.parameters(), BASE["lr"])
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, BASE["lr"], BASE["steps"], pct_start=0.05)
    for _ in tqdm(range(BASE["steps"]), desc=f"training the {kind} base, once", unit="step"):
        true, place = (torch.randint(m, (batch,), generator=gen) for m in (n, len(PLACES)))
        wrong = torch.rand(batch, generator=gen) < BASE["wrong"]
        caption = (true + wrong * torch.randint(1, n, (batch,), generator=gen)) % n
        time, x0 = torch.rand(batch, generator=gen), images[true, place]
        noise = torch.randn(x0.shape, generator=gen)
        signal, blur, target = 1 - time, time, noise - x0
        if kind == "tiny-ddpm":
            t, target = (time * 1000).long(), noise
            time, signal, blur = t / 1000, alphas[t].sqrt(), (1 - alphas[t]).sqrt()
        x = signal.view(-1, 1, 1, 1) * x0 + blur.view(-1, 1, 1, 1) * noise
        optimizer.zero_grad()
        F.mse_loss(net(x, time, words[caption]), target).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        rate.step()

def tiny_base(kind: str) -> TinyDiT:
    """The base from the user's cache, or trained now and put there."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net = TinyDiT(*(BASE[k] for k in ("width", "blocks", "heads", "patch")))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treegrpo"
    recipe = json.dumps([kind, BASE, CAPTIONS, PLACES, str(net)])
    path = cache / f"{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.pt"
    if not path.exists():
        pretrain(kind, net)
        save_atomic(net.state_dict(), path)
    net.load_state_dict(torch.load(path, weights_only=True))
    return net.eval()

class TinyPolicy(Policy):
    """The tiny world: `tiny` is a flow model, `tiny-ddpm` predicts eps and is sampled by DDIM."""
    guided = False

    def __init__(self, cfg: Config, device: torch.device):
        self.cfg, self.device, self.net = cfg, device, tiny_base(cfg.model).to(device)
        self.shape = self.latent_shape(cfg)
        self.trainable = list(self.net.parameters())
        self.initial = [p.detach().clone() for p in self.trainable]
        self.kind, self.grid = "flow", torch.linspace(1, 0, cfg.steps + 1)
        self.times = self.grid
        if cfg.model == "tiny-ddpm":  # SD1.5's "leading" spacing with offset 1
            t = torch.arange(cfg.steps - 1, -1, -1) * (1000 // cfg.steps) + 1
            self.kind, self.times = "eps", t / 1000
            self.grid = torch.cat([ddpm_alphas()[t], ddpm_alphas()[:1]])

    @classmethod
    def latent_shape(cls, cfg: Config) -> tuple[int, int, int]:
        """(C, H, W) of the latents, the pixels; refuses flags that the tiny world does not have."""
        allow(cfg.resolution == 16, "resolution", cfg.resolution, "16 in the tiny world")
        allow(cfg.guidance == 1, "guidance", cfg.guidance, "1 in the tiny world")
        return 3, 16, 16

    def encode(self, prompts):
        return {"words": caption_words(prompts)}

    def denoise(self, x, i, cond):
        return self.net(x, self.times[i].to(x.device).expand(len(x)), cond["words"])

    def decode(self, latents):
        return (latents.to(self.device) / 2 + 0.5).clamp(0, 1)

    def export(self, folder: Path) -> None:
        save_atomic(self.net.state_dict(), folder / "model.pt")

    def restore(self, folder: Path) -> None:
        self.net.load_state_dict(torch.load(folder / "model.pt", weights_only=True))

# ---- real models: diffusers pipelines of three classes ----------------------------------------
REPOSITORIES = {"sd15": "stable-diffusion-v1-5/stable-diffusion-v1-5",
                "sd3": "stabilityai/stable-diffusion-3.5-medium",
                "flux": "black-forest-labs/FLUX.1-dev"}
PIPELINES = {"StableDiffusionPipeline": "sd15", "StableDiffusion3Pipeline": "sd3",
             "FluxPipeline": "flux"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = {"epsilon": "eps", "v_prediction": "v"}
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]  # LoRA targets: ddpo-pytorch
JOINT = ["attn." + t for t in (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")]

def missing(model: str) -> str:
    """What to say of a model that cannot be loaded: where else to look, and its licence gate."""
    source = REPOSITORIES.get(model, model)
    if Path(source).is_dir():
        return f"--model {model}: the folder is not a complete pipeline"
    gate = (f"; its licence must be accepted at https://huggingface.co/{source}, followed by "
            "`hf auth login`") if source in (REPOSITORIES["sd3"], REPOSITORIES["flux"]) else ""
    return (f"--model {model}: {source} is neither in the local cache nor to be had from the hub"
            f"{gate}; for a copy on disk use --model FOLDER")

@functools.cache
def model_config(model: str, file: str = "model_index.json") -> dict:
    """A configuration file of a pipeline; no weights."""
    from huggingface_hub import hf_hub_download
    source = REPOSITORIES.get(model, model)
    with explained(missing(model), OSError, ValueError):
        path = Path(source, file) if Path(source).is_dir() else hf_hub_download(source, file)
        return json.loads(Path(path).read_text())

def load_pipeline(cfg: Config, core: str):
    """Pipeline on the CPU: VAE and weights that are trained in float32, the rest in cfg.dtype."""
    from diffusers import DiffusionPipeline
    source, dtype = REPOSITORIES.get(cfg.model, cfg.model), DTYPES[cfg.dtype]
    skip = {"safety_checker", "feature_extractor", "image_encoder"}  # and the T5 if not there
    if Path(source).is_dir() and not Path(source, "text_encoder_3").is_dir():
        skip |= {"text_encoder_3", "tokenizer_3"}
    parts = model_config(cfg.model).items()
    without = {k: None for k, v in parts if k in skip or v == [None, None]}
    dtypes = {"vae": torch.float32, core: torch.float32 if cfg.full else dtype, "default": dtype}
    with explained(missing(cfg.model), OSError, ValueError):
        return DiffusionPipeline.from_pretrained(source, dtype=dtypes, **without)

class PipelinePolicy(Policy):
    """A diffusers pipeline whose denoiser `core` is trained. Subclasses give `tables`, `forward`.
    Only the tables of the scheduler are used, for its step() keeps an index of its own.
    `asks` and `gives` are the arguments and results of the pipeline's encode_prompt.
    """
    core, patch, targets, embedded = "transformer", 2, JOINT, False  # targets: Flow-GRPO

    def __init__(self, cfg: Config, device: torch.device):
        self.cfg, self.device, self.dtype = cfg, device, DTYPES[cfg.dtype]
        self.shape, self.guided = self.latent_shape(cfg), cfg.guidance > 1 and not self.embedded
        self.pipe = load_pipeline(cfg, self.core)
        self.net, self.vae = getattr(self.pipe, self.core), self.pipe.vae
        for part in self.pipe.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False).eval()
        self.trainable = self.unfreeze()
        self.pipe.to(device)
        self.vae.enable_slicing()
        self.initial = [p.detach().clone() for p in self.trainable]  # LoRA: B = 0, the base
        self.times, self.grid = self.tables(self.pipe.scheduler.config)  # (T,), (T+1,)
        self.embed = functools.lru_cache(1024)(self.embed)  # on the CPU; FLUX: 4 MB a prompt

    @classmethod
    def latent_shape(cls, cfg: Config) -> tuple[int, int, int]:
        """(C, H, W) of the latents; refuses what cannot work, from configurations alone."""
        vae = model_config(cfg.model, "vae/config.json")
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        side, rest = divmod(cfg.resolution, factor)
        require(rest == side % cls.patch == 0, f"--resolution {cfg.resolution}: must be a multiple "
                f"of {factor * cls.patch} for --model {cfg.model}")
        noise = model_config(cfg.model, "scheduler/scheduler_config.json")
        kind = noise.get("prediction_type", "epsilon")
        allow(kind in KINDS and not noise.get("rescale_betas_zero_snr"), "model",
              f"{cfg.model}: predicts {kind}", f"{', '.join(KINDS)}, without zero terminal SNR")
        return vae["latent_channels"], side, side

    def unfreeze(self) -> list[nn.Parameter]:
        """LoRA matrices, or with --full all weights of the denoiser, in float32."""
        from peft import LoraConfig
        cfg, net = self.cfg, self.net
        net.requires_grad_(cfg.full)
        unused = [f"{block}.{name}" for block, m in net.named_modules()  # SD3: the last block's
                  if getattr(m, "context_pre_only", None)  # text queries, whose output is dropped
                  for name in ("add_q_proj", "norm_added_q") if getattr(m, name, None)]
        for name in unused:
            net.get_submodule(name).requires_grad_(False)
        targets = [name for name, _ in net.named_modules()
                   if name.endswith(tuple(self.targets)) and name not in unused]
        lora = LoraConfig(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, target_modules=targets,
                          init_lora_weights="gaussian")
        if not cfg.full:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(cfg.seed)
                net.add_adapter(lora)
        if cfg.grad_checkpointing:
            net.enable_gradient_checkpointing()
            for m in net.modules():  # diffusers checkpoints in train mode only; dropout stays off
                m.train(not isinstance(m, nn.Dropout))
        trainable = [p for p in net.parameters() if p.requires_grad]
        for p in trainable:
            p.data = p.data.float()
        return trainable

    @torch.no_grad()
    def embed(self, prompt: str) -> dict[str, Tensor]:
        parts = self.pipe.encode_prompt(prompt, device=self.device, **self.asks)
        return {name: part[0].cpu() for name, part in zip(self.gives, parts, strict=False) if name}

    def encode(self, prompts):
        rows = [self.embed(p) for p in prompts]
        if self.guided:
            rows = [{k: torch.stack([self.embed("")[k], row[k]]) for k in row} for row in rows]
        return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}

    def denoise(self, x, i, cond):
        t = self.times[i].to(self.device).expand(len(x))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.forward(x, t, cond)

    @torch.no_grad()
    def decode(self, latents):
        scale, shift = self.vae.config.scaling_factor, self.vae.config.shift_factor or 0.0
        z = latents.to(self.device, torch.float32) / scale + shift
        return (self.vae.decode(z, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)

    def lora(self) -> dict[str, Tensor]:
        from peft.utils import get_peft_model_state_dict
        return get_peft_model_state_dict(self.net)

    def export(self, folder: Path) -> None:
        """For pipe.load_lora_weights(folder); with --full a folder `core` of all weights."""
        with explained(f"{folder} was not written", Exception, error=OSError):
            if self.cfg.full:
                return self.net.save_pretrained(folder / self.core)
            alpha = self.net.peft_config["default"].to_dict()  # without it alpha = rank is assumed
            self.pipe.save_lora_weights(folder, **{f"{self.core}_lora_layers": self.lora(),
                                                   f"{self.core}_lora_adapter_metadata": alpha})

    def restore(self, folder: Path) -> None:
        """Read what `export` wrote."""
        from safetensors.torch import load_file
        if self.cfg.full:
            saved = type(self.net).from_pretrained(folder / self.core)
            return self.net.load_state_dict(saved.state_dict())
        saved = load_file(folder / "pytorch_lora_weights.safetensors")
        for name, value in self.lora().items():
            value.copy_(saved[f"{self.core}.{name}"])

class SDPolicy(PipelinePolicy):
    """Stable Diffusion 1 and 2, by DDIM whatever scheduler the repository holds (SD 1.5: PNDM)."""
    core, patch, targets, gives = "unet", 1, ATTENTION, ("text",)
    asks = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}

    def tables(self, config):
        from diffusers import DDIMScheduler
        ddim = DDIMScheduler.from_config(config)
        ddim.set_timesteps(self.cfg.steps)
        self.kind, t = KINDS[ddim.config.prediction_type], ddim.timesteps
        return t, torch.cat([ddim.alphas_cumprod[t], ddim.final_alpha_cumprod[None]])

    def forward(self, x, t, cond):
        return self.net(x, t, encoder_hidden_states=cond["text"], return_dict=False)[0]

class SD3Policy(PipelinePolicy):
    """Stable Diffusion 3 and 3.5, with or without the T5 encoder."""
    kind, gives = "flow", ("text", None, "pooled")
    asks = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}

    def tables(self, config):
        from diffusers import FlowMatchEulerDiscreteScheduler
        flow, T, how = FlowMatchEulerDiscreteScheduler.from_config(config), self.cfg.steps, {}
        if config["use_dynamic_shifting"]:  # mu, linear in the number of image tokens
            lo, hi = config["base_image_seq_len"], config["max_image_seq_len"]
            share = (math.prod(self.shape[1:]) / 4 - lo) / (hi - lo)
            how["mu"] = config["base_shift"] + share * (config["max_shift"] - config["base_shift"])
        if self.embedded:  # FLUX starts from uniform sigmas, SD3 from the scheduler's own
            how["sigmas"] = torch.linspace(1, 1 / T, T, dtype=torch.float64).tolist()
        flow.set_timesteps(T, **how)
        return flow.timesteps, flow.sigmas

    def forward(self, x, t, cond, **more):
        return self.net(hidden_states=x, timestep=t, encoder_hidden_states=cond["text"],
                        pooled_projections=cond["pooled"], return_dict=False, **more)[0]

class FluxPolicy(SD3Policy):
    """FLUX.1: the denoiser takes the guidance scale as an input and latents in 2 x 2 patches."""
    embedded, asks, gives = True, {"prompt_2": None}, ("text", "pooled")

    def forward(self, x, t, cond):
        h, w = (s // 2 for s in x.shape[2:])
        row, col = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        place = torch.stack([0 * row, row, col], -1).flatten(0, 1).to(x)  # (L, 3)
        scale = torch.full_like(t, self.cfg.guidance) if self.net.config.guidance_embeds else None
        x = F.pixel_unshuffle(x, 2).flatten(2).mT  # (N, L, 4C)
        v = super().forward(x, t / 1000, cond, guidance=scale, img_ids=place,
                            txt_ids=place.new_zeros(cond["text"].shape[1], 3))
        return F.pixel_shuffle(v.mT.unflatten(2, (h, w)), 2)

# Config's own defaults: 10 steps (TreeGRPO); rank 32, alpha 64, noise .7 (Flow-GRPO); 8 prompts,
# 216 images (DDPO takes 256). Here: 512 pixels (DDPO, Flow-GRPO); micro_batch, eval_images: ours.
REAL = {"resolution": 512, "reward": ("hpsv2",), "dtype": "bf16", "eval_images": 64, "lr": 3e-4}
FULL_LR = 1e-5  # TreeGRPO, DanceGRPO, MixGRPO: all weights. 3e-4: DDPO, Flow-GRPO, LoRA
FAMILIES = {  # class of the policy, and the defaults of flags that depend on the model
    "tiny": (TinyPolicy, {}), "tiny-ddpm": (TinyPolicy, {}),
    "sd15": (SDPolicy, REAL | {"guidance": 5.0, "micro_batch": 8}),  # guidance: DDPO
    "sd3": (SD3Policy, REAL | {"guidance": 4.5, "micro_batch": 4}),  # TreeGRPO, Flow-GRPO
    "flux": (FluxPolicy, REAL | {"guidance": 3.5, "micro_batch": 2})}  # DanceGRPO, MixGRPO

def family(model: str) -> str:
    """Row of FAMILIES: by name, else by the class in the pipeline's model_index.json."""
    if model in FAMILIES:
        return model
    known = [*FAMILIES, "a hub id (owner/name)", "a local folder"]
    allow("/" in model or Path(model).is_dir(), "model", model, known)
    found = model_config(model).get("_class_name")
    allow(found in PIPELINES, "model", f"{model}: is a {found}", PIPELINES)
    return PIPELINES[found]

def is_ddim(model: str) -> bool:
    return family(model) in ("tiny-ddpm", "sd15")

# ==== 9. Rewards: fn(images (B, 3, H, W) in [0, 1], prompts) -> (B,) ============================
def shapes_reward(device, folder=None):
    """exp(-16 d), d the mean squared distance to the nearest clean drawing of the caption."""
    drawings = {c: draw_caption(c).to(device) for c in CAPTIONS}
    def score(images: Tensor, prompts: list[str]) -> Tensor:
        images = F.interpolate(images, (16, 16), mode="area")
        want = torch.stack([drawings[p] for p in prompts])  # (B, 4, 3, 16, 16)
        return torch.exp(-16 * ((images[:, None] - want) ** 2).mean((2, 3, 4)).amin(1))
    return score

def reward_makers() -> dict:
    """name -> function(device, folder of local weights or None) that makes the reward."""
    import evaluate
    return {"shapes": shapes_reward} | evaluate.SCORERS

def parse_reward(spec: str) -> tuple[str, float]:
    """'name', 'name:0.8', 'module:function' or 'module:function:0.8' -> (name, weight)."""
    (name, _, last), weight, known = spec.rpartition(":"), 1.0, reward_makers()
    try:
        weight = float(last)
    except ValueError:
        name = spec
    allow(math.isfinite(weight) and (":" in name or name in known), "reward", spec,
          [*known, "MODULE:FUNCTION", "each with :WEIGHT or without"])
    return name, weight

def local_weights(pairs) -> dict[str, Path]:
    """--reward-weights NAME=FOLDER ... -> {name: folder}."""
    known, folders = reward_makers(), {}
    for name, _, folder in (pair.partition("=") for pair in pairs):
        folders[name] = Path(folder).expanduser()
        allow(name in known and folder and folders[name].is_dir(), "reward-weights",
              f"{name}={folder}", f"NAME=FOLDER, a folder that exists, of {', '.join(known)}")
    return folders

def load_function(flag: str, name: str):
    """The function that a flag names as MODULE:FUNCTION; the module may lie in this folder."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    with explained(f"{flag} {name}", Exception):
        found = getattr(importlib.import_module(module), function)
    require(callable(found), f"{flag} {name}: is not a function")
    return found

def load_rewards(cfg: Config, device) -> dict:
    """name -> fn(images, prompts), all of --reward."""
    folders, known = local_weights(cfg.reward_weights), reward_makers()
    return {name: known[name](device, folders.get(name)) if name in known else
            load_function("--reward", name) for name, _ in map(parse_reward, cfg.reward)}

def check_images(images: Tensor, prompts: list[str]) -> None:
    """Refuse what no reward should see: a wrong shape, an empty prompt, a broken image."""
    require(images.shape[:-2] == (len(prompts), 3) and images.is_floating_point(),
            f"images are {images.dtype} {tuple(images.shape)}; must be float ({len(prompts)}, 3, "
            "H, W)", RewardError)
    low, high = images.flatten(1).aminmax(dim=1)  # NaN where an image holds one
    for prompt, lo, hi in zip(prompts, low.tolist(), high.tolist(), strict=True):
        require(prompt.strip(), f"an empty prompt, {prompt!r}", RewardError)
        require(0 <= lo <= hi <= 1 and hi > 0, f"image of {prompt!r} spans {lo:.3g} to {hi:.3g}; "
                "must be finite, within 0 to 1 and not all black", NumericalError)

@torch.no_grad()
def score(rewards: dict, images: Tensor, prompts: list[str]) -> Tensor:
    """All rewards of a batch of images -> (R, B) float32 on the CPU, checked."""
    check_images(images, prompts)
    out, about = [], f"for {len(prompts)} prompts, the first {prompts[0]!r}"
    for name, function in rewards.items():
        try:
            value = function(images, prompts)
        except Exception as e:
            raise RewardError(f"reward {name} raised {type(e).__name__}: {e}, {about}") from e
        got = (tuple(value.shape), value.dtype) if torch.is_tensor(value) else (type(value),)
        require(got[0] == (len(images),) and value.is_floating_point(),
                f"reward {name} returned {got} {about}; must be a float tensor (B,)", RewardError)
        for prompt, v in zip(prompts, value.tolist(), strict=True):
            require(math.isfinite(v), f"reward {name} is {v} for the prompt {prompt!r}",
                    NumericalError)
        out.append(value.float().cpu())
    return torch.stack(out)

# ==== 10. A run: prompts, checkpoints, evaluation, one iteration ================================
def read_prompts(path: str) -> list[str]:
    """Prompts of a .txt (one a line) or .jsonl file (key 'prompt'); blank lines are skipped."""
    prompts, where = [], f"--prompts {path}"
    with explained(where, OSError, UnicodeDecodeError):
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    for n, line in enumerate(lines, 1):
        with explained(f"{where}: line {n} is not a JSON object with a text under 'prompt'",
                       ValueError, KeyError, TypeError, AttributeError):
            if line.strip():
                text = json.loads(line)["prompt"] if path.endswith(".jsonl") else line
                prompts.append(text.strip())
                require(prompts[-1], f"{where}: line {n} holds an empty prompt")
    require(prompts, f"{where}: holds no prompt")
    return prompts

def training_prompts(cfg: Config) -> list[str]:
    """Prompts of the file, or the built-in ones; the tiny world knows its captions only."""
    import evaluate
    tiny, rewards = family(cfg.model) not in REPOSITORIES, dict(map(parse_reward, cfg.reward))
    for name in ("prompts_per_iteration", "eval_images"):
        allow(getattr(cfg, name) >= world()[1], name, getattr(cfg, name),
              f">= {world()[1]}, the number of processes")
    require(len(rewards) == len(cfg.reward), f"--reward {' '.join(cfg.reward)}: once each")
    local_weights(cfg.reward_weights)
    built_in = CAPTIONS if tiny else evaluate.PROMPTS
    prompts = read_prompts(cfg.prompts) if cfg.prompts else list(built_in)
    strange = [p for p in prompts if p not in CAPTIONS and (tiny or "shapes" in rewards)]
    allow(not strange, "prompts", f"{cfg.prompts}: {strange[:1]}",
          f"a {'|'.join(COLOURS)} {'|'.join(SHAPES)}")
    return prompts

def draw_prompts(cfg: Config, prompts: list[str], iteration: int) -> tuple[list[int], list[str]]:
    """This process' prompt slots of an iteration and their prompts; an epoch is a permutation."""
    rank, size = world()
    slots, chosen = list(range(cfg.prompts_per_iteration))[rank::size], []
    for slot in slots:
        epoch, n = divmod(iteration * cfg.prompts_per_iteration + slot, len(prompts))
        chosen.append(stream(cfg.seed, epoch, "prompts").sample(prompts, len(prompts))[n])
    return slots, chosen

def save_atomic(state, path: Path) -> None:
    """Write a text, or by torch.save: the old file stays until the new one is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as f:
            f.write(state.encode()) if isinstance(state, str) else torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as e:  # torch.save raises both
        cause = e.__context__ if isinstance(e.__context__, OSError) else e
        raise OSError(f"{path}: cannot be written: {str(cause).splitlines()[0]}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, as getrusage(2) has it
LR_SCHEDULES = {"constant": lambda t: 1.0, "linear": lambda t: 1 - t,  # t from 0 to 1
                "cosine": lambda t: 0.5 + 0.5 * math.cos(math.pi * t)}

def pick_device(name: str) -> torch.device:
    """auto: the GPU, if there is one."""
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    known = ["cpu", *["mps"] * torch.backends.mps.is_available(), *["cuda"] * bool(gpus), *gpus]
    allow(name in ("auto", *known), "device", name, ["auto", *known])
    return torch.device(name if name != "auto" else "cuda" if gpus else "cpu")

class Run:
    """What a run holds: policy, rewards, optimiser, weight average, and how far it is."""

    def __init__(self, cfg: Config):
        self.cfg, self.prompts = cfg, training_prompts(cfg)
        self.device = pick_device(cfg.device)
        self.weights = torch.tensor([w for _, w in map(parse_reward, cfg.reward)])
        self.policy = FAMILIES[family(cfg.model)][0](cfg, self.device)
        self.rewards, self.trainable = load_rewards(cfg, self.device), self.policy.trainable
        self.optimizer = torch.optim.AdamW(self.trainable, cfg.lr, weight_decay=cfg.weight_decay)
        self.ema = [p.detach().clone() for p in self.trainable] if cfg.ema else []
        self.iteration, self.best = 0, -math.inf

    def save(self) -> None:
        state = {"weights": [p.data for p in self.trainable], "ema": self.ema,
                 "optimizer": self.optimizer.state_dict(),
                 "progress": {"iteration": self.iteration, "best": self.best}}
        if world()[0] == 0:
            save_atomic(state, self.cfg.folder / "last.pt")

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; UsageError if the file is not one of this configuration."""
        with explained(f"{path} is not a checkpoint of this run", Exception):
            state = torch.load(path, map_location="cpu", weights_only=True)
            values = state["weights"] + state["ema"]
            for p, v in zip([*self.trainable, *self.ema], values, strict=True):
                p.data.copy_(v.view_as(p))  # copy_ alone would broadcast
            self.optimizer.load_state_dict(state["optimizer"])
            self.iteration, self.best = (state["progress"][k] for k in ("iteration", "best"))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return torch.cat([self.policy.decode(x) for x in latents.split(self.cfg.micro_batch)])

    def grow_tree(self, key: tuple, slots, prompts: list[str], steps, roots: int = 1) -> Tree:
        """The trees of some prompts; the noise depends on key and slots only."""
        owner = torch.arange(len(prompts)).repeat_interleave(roots)
        return rollout(self.policy, self.policy.encode(prompts), owner, steps,
                       tree_noise(key, slots, self.policy.shape), self.cfg.micro_batch)

    def grow(self, iteration: int, slots: list[int], prompts: list[str]):
        """The trees of a training iteration; images and rewards (R, L) of their leaves."""
        steps, key = schedule(self.cfg, iteration), (self.cfg.seed, iteration)
        tree = self.grow_tree(key, slots, prompts, steps, self.cfg.roots)
        images = self.decode(tree.leaves)
        return tree, images, score(self.rewards, images, [prompts[p] for p in tree.prompt])

    def sample(self, prompts: list[str], key: tuple, slots: list[int]) -> Tensor:
        """Images of the full ODE sampler."""
        steps = ode_steps(range(self.cfg.steps + 1))
        return self.decode(self.grow_tree(key, slots, prompts, steps).leaves)

    def averaged(self):
        """Context in which the policy has the weights that are evaluated and exported."""
        return swapped(self.trainable, self.ema or [p.data for p in self.trainable])

    def measure(self) -> dict:
        """Mean reward of the full ODE sampler on fixed prompts and noise; exports the best."""
        rank, size = world()
        slots = list(range(self.cfg.eval_images))[rank::size]
        prompts = [self.prompts[n % len(self.prompts)] for n in slots]
        with self.averaged(), naming(prompts):
            rewards = together(lambda: score(
                self.rewards, self.sample(prompts, ("evaluation",), slots), prompts))
            mean = all_sum((self.weights @ rewards).sum()).item() / self.cfg.eval_images
            if mean > self.best:
                self.best = mean
                if rank == 0:
                    part, best = self.cfg.folder / ".best", self.cfg.folder / "best"
                    self.policy.export(part)  # if this fails or is killed the old one stays
                    shutil.rmtree(best, ignore_errors=True)
                    os.replace(part, best)
        return {"eval": mean, "best": self.best}

    def mark(self) -> dict:
        """Clock, count of denoiser evaluations, peak memory in GiB so far."""
        peak = (torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT)
        return {"seconds": time.perf_counter(), "evaluations": self.policy.evaluations,
                "memory": peak / 2**30}

    def train_iteration(self) -> dict:
        """Grow, reward, back up, update -> what the log says of it (the README explains it)."""
        import evaluate
        cfg, policy, start = self.cfg, self.policy, self.mark()
        slots, prompts = draw_prompts(cfg, self.prompts, self.iteration)
        with naming(prompts):
            tree, images, rewards = together(self.grow, self.iteration, slots, prompts)
        grown = self.mark()
        adv = edge_advantages(tree, rewards, cfg, self.weights)
        leaf = leaf_advantages(rewards, tree.groups(cfg.group), self.weights)
        for group in self.optimizer.param_groups:
            group["lr"] = cfg.lr * LR_SCHEDULES[cfg.lr_schedule](self.iteration / cfg.iterations)
        with naming(prompts):
            epochs = update(policy, tree, adv, leaf, policy.encode(prompts), cfg, self.optimizer,
                            self.iteration)
        for average, p in zip(self.ema, self.trainable, strict=False):
            average.lerp_(p.data, 1 - cfg.ema)
        log = {"window": tree.levels[0].step.i, "lr": group["lr"]}
        log |= evaluate.rollout_log(tree, images, rewards, self.weights, list(self.rewards))
        log |= {f"{k}/{n}": v for n, epoch in enumerate(epochs) for k, v in epoch.items()}
        for phase, a, b in (("sample", start, grown), ("update", grown, self.mark())):
            log |= {f"{k}_{phase}": b[k] - a[k] * (k != "memory") for k in b}
        return merge_logs(log, len(slots))

# ==== 11. Training loop =========================================================================
@contextlib.contextmanager
def open_folder(cfg: Config):
    """Create and lock the run folder; one that stays empty goes away again."""
    folder, where = cfg.folder, f"--out {cfg.folder}"
    require(cfg.resume or cfg.overwrite or not (folder / "config.json").exists(), f"{where}: holds "
            f"a run; go on with --resume {folder}, replace it with --overwrite, or name another")
    with explained(where, OSError), explained(f"{where}: another run is writing", BlockingIOError):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, at the latest
    try:
        yield
    finally:
        lock.close()
        if os.listdir(folder) == [".lock"]:
            (folder / ".lock").unlink()
            folder.rmdir()

def start_files(run: Run) -> None:
    """Cut the log back to where the run starts or goes on; where config.json is can be resumed."""
    folder, log = run.cfg.folder, run.cfg.folder / "log.jsonl"
    if not run.cfg.resume:
        (folder / "config.json").unlink(missing_ok=True)
        run.save()
    lines = log.read_text().splitlines() if run.cfg.resume and log.exists() else []
    upto = run.iteration or -1  # the evaluation before the first iteration is done again
    keep = [x for x in lines if x.endswith("}") and json.loads(x)["iteration"] <= upto]
    save_atomic("".join(x + "\n" for x in keep), log)
    config = dataclasses.asdict(run.cfg) | {"resume": "", "overwrite": False}
    save_atomic(json.dumps(config, indent=1) + "\n", folder / "config.json")

def train(cfg: Config) -> Run:
    """Train from `cfg`, or continue `cfg.resume`; all it writes lies in `cfg.folder`."""
    import evaluate
    stop = []

    def handler(*_):  # the first signal stops after this iteration, the second at once
        os._exit(130) if stop else stop.append(True)
    with contextlib.ExitStack() as ends:
        join_processes(ends)
        leader = world()[0] == 0
        if leader:
            ends.enter_context(open_folder(cfg))
        if family(cfg.model) not in REPOSITORIES and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # tiny matrices: on busy cores more threads are far slower
        run = Run(cfg)
        if cfg.resume:
            run.load(cfg.folder / "last.pt")
        if leader:
            print(evaluate.plan(cfg, math.prod(run.policy.shape)), flush=True)
            start_files(run)
        for s in (signal.SIGINT, signal.SIGTERM):
            ends.callback(signal.signal, s, signal.signal(s, handler))
        try:
            loop(run, stop)
        except RewardError:  # raised before the update: the state is that of the last iteration
            run.save()
            raise
    if leader and not stop:
        evaluate.draw_run(run)
    return run

BAR = {"reward": "reward", "best eval": "best", "|rho-1|": "ratio_max/0", "clip": "clip_high/0"}

def attempt(run: Run, function, key: str) -> dict:
    """What the function has for the log; under `key`, why that is nothing."""
    from tqdm import tqdm
    try:
        return function()
    except NumericalError as e:
        message = f"{e} (iteration {run.iteration}, seed {run.cfg.seed})"
        tqdm.write(f"{key}: {message}", file=sys.stderr)
        return {key: message}

def loop(run: Run, stop: list) -> None:
    """Iterate until the end, a signal, or three failures in a row."""
    import evaluate
    from tqdm import tqdm
    cfg, leader, failed, history = run.cfg, world()[0] == 0, 0, []
    track = load_function("--track", cfg.track) if cfg.track and leader else None

    def write(log: dict) -> None:
        log = {"iteration": run.iteration} | log
        if leader:
            with open(cfg.folder / "log.jsonl", "a") as f:
                f.write(json.dumps(log) + "\n")
            evaluate.watch(history, log)
        if track:
            track(log)

    if run.iteration == 0:
        write(attempt(run, run.measure, "eval_skipped"))
    with tqdm(total=cfg.iterations, initial=run.iteration, disable=not leader, unit="it") as bar:
        while run.iteration < cfg.iterations and not all_sum(torch.tensor(len(stop))):
            log = attempt(run, run.train_iteration, "skipped")
            failed = failed + 1 if "skipped" in log else 0
            run.iteration += 1
            last = run.iteration == cfg.iterations or failed == 3
            if last or run.iteration % cfg.eval_every == 0:
                log |= attempt(run, run.measure, "eval_skipped")
            write(log)
            if last or stop or run.iteration % cfg.save_every == 0:
                run.save()
            require(failed < 3, f"three iterations in a row failed: {log.get('skipped')}",
                    NumericalError)
            shown = log | {"best": run.best}
            bar.set_postfix_str(" ".join(f"{name} {shown[key]:.3g}" for name, key in BAR.items()
                                         if key in shown))
            bar.update()
    run.save()  # a signal may have come in the first evaluation, or after the last save

# ==== 12. Command line ==========================================================================
class Parser(argparse.ArgumentParser):
    def error(self, message):  # "argument --lr: invalid float value: 'x'" and the like
        message = re.sub(r": invalid (\w+) value: '(.*)'", r" \2: must be a \1", message)
        raise UsageError(message.removeprefix("argument ").replace("a int", "an int"))

def parse(argv: list[str] | None) -> Config:
    """Flags -> Config. A flag beats the resumed run, the model, the preset and the default."""
    parser = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                    epilog=f"Presets: {', '.join(PRESETS)}. In brackets: defaults, which presets "
                    "and models override.", argument_default=argparse.SUPPRESS)
    for f in dataclasses.fields(Config):
        line, choices = f.metadata["help"], f.metadata["choices"]
        many = isinstance(f.default, tuple)
        shown = " ".join(map(str, f.default)) if many else str(f.default)
        how = {"type": type([*f.default, ""][0] if many else f.default),
               "metavar": f"{{{','.join(choices)}}}" if choices else "X",
               "nargs": "+" if many else None, "help": line + f" [{shown}]" * bool(shown)}
        if isinstance(f.default, bool):
            how = {"action": argparse.BooleanOptionalAction, "help": line}
        parser.add_argument("--" + f.name.replace("_", "-"), **how)
    given, unknown = parser.parse_known_args(argv)
    for flag in unknown:
        hint = nearest(flag.partition("=")[0], parser._option_string_actions)
        raise UsageError(f"unknown flag {flag}{hint}; --help lists all")
    given = tuples(vars(given))
    cfg = resume_config(given) if "resume" in given else resolve(given)
    check_config(cfg)
    return cfg

def tuples(values: dict) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

def resolve(given: dict) -> Config:
    """Fill in what the flags leave open: from the preset, then from the model."""
    method, model, extra = given.get("method", "treegrpo"), given.get("model", "tiny"), {}
    allow(method in PRESETS, "method", method, PRESETS)
    if model == "runwayml/stable-diffusion-v1-5":
        print(f"treegrpo: {model} has left the hub; using sd15", file=sys.stderr)
        given["model"] = model = "sd15"
    if is_ddim(model):  # eta 1 is DDPM; with growth it is reached at the window's end
        growth = (PRESETS[method] | given).get("noise_growth", 0.0)
        extra["noise_level"] = 1 / (1 + max(growth, 0.0))
    if given.get("full") and family(model) in REPOSITORIES:
        extra["lr"] = FULL_LR
    return Config(**PRESETS[method] | FAMILIES[family(model)][1] | extra | given)

def read_config(folder: Path) -> Config:
    """The configuration of a run folder."""
    with explained(f"{folder}: no configuration of a run there", Exception):
        return Config(**tuples(json.loads((folder / "config.json").read_text())))

MAY_CHANGE = ("iterations", "reward_weights", "device", "micro_batch", "eval_every", "save_every",
              "track", "plan")

def resume_config(given: dict) -> Config:
    """The configuration of the run to resume, with the few flags that may change."""
    folder = given.pop("resume")
    old = read_config(Path(folder))
    for k, v in given.items():
        require(k in MAY_CHANGE or v == getattr(old, k), f"--{k.replace('_', '-')} {v}: the run "
                f"has {getattr(old, k)}; only {', '.join(MAY_CHANGE)} may change")
    return dataclasses.replace(old, **given, resume=folder, out=folder)

def main(argv: list[str] | None = None) -> int:
    try:
        cfg = parse(argv)
        if cfg.plan:
            import evaluate
            print(evaluate.plan(cfg))
        else:
            train(cfg)
        return 0
    except (UsageError, RewardError, NumericalError, OSError) as e:
        print(f"treegrpo: {e}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    except torch.OutOfMemoryError:
        print(f"treegrpo: out of GPU memory; in this order: --micro-batch below {cfg.micro_batch}, "
              "--grad-checkpointing, --dtype bf16, a smaller --resolution", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130

if __name__ == "__main__":
    sys.exit(importlib.import_module("treegrpo").main())  # one module for evaluate.py and for us
