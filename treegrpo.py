#!/usr/bin/env python
"""TreeGRPO: reinforcement learning for diffusion and flow models in which denoising is a search tree.

A text-to-image model denoises in T steps. Deterministic (ODE) steps are shared: every descendant
reuses the prefix. Stochastic (SDE) steps inside a window branch: each node gets k children that
differ only in their noise. The images at the leaves are rewarded, the rewards are backed up the
tree to one advantage per edge, and a clipped policy-gradient update trains the edges.

    repeat:
        steps = schedule(cfg, iteration)            # where to branch this time            (eq. 7)
        tree  = rollout(policy, prompts, steps)     # ODE prefix, k-ary window, ODE rest
        S     = rewards of the images at the leaves
        A     = leaf_advantages(S)                  # per prompt: (S - mean) / std         (eq. 9)
        A     = backup(tree, A)                     # an edge = mean of the edges below it (eq. 10, 11)
        A     = normalize_siblings(tree, A)         # an edge against its siblings
        update(policy, tree, A)                     # clipped surrogate on every edge      (eq. 12)

One denoiser evaluation at a node serves all its k child edges, so a tree of 27 leaves is trained
with 13 forward/backward passes where 27 separate trajectories need 243.

Papers: TreeGRPO (arXiv 2512.08153, "eq." below) and Dynamic-TreeRPO (arXiv 2509.23352, "D eq.").
Deviations from them, each marked where it is made and undone by `--method treegrpo-paper`:
  - siblings are centred on the mean of the *other* siblings (the paper does not centre them);
  - children are averaged equally (the paper weights them by softmax log-probability, which is the
    same to 1/sqrt(2D) on mean-reduced log-probabilities of D-dimensional latents);
  - the loss is the mean over edges (the paper sums them).

    python treegrpo.py                              # tiny model, nothing to download, minutes on a CPU
    python treegrpo.py --model sd15                 # Stable Diffusion 1.5 with LoRA on one GPU
    python treegrpo.py --method flow-grpo           # a flat baseline from the same code
    python treegrpo.py --reward my_file:my_function # fn(images (B,3,H,W) in [0,1], prompts) -> (B,)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import fcntl
import hashlib
import importlib
import json
import math
import os
import pickle
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UsageError(Exception):
    """A mistake of the user's: `main` prints it as one line and exits with code 2."""


class NumericalError(Exception):
    """A value that is not finite where it must be: the update is skipped, three in a row stop the run."""


class RewardError(Exception):
    """A reward function that raised or returned something else than one finite float per image."""


# ======================================================================================
# 1. Configuration: one frozen dataclass; the command line and its help are made from it
# ======================================================================================
def opt(default, help, *, lo=None, hi=None, above=None, choices=None):
    """A field of Config: default, help line, and the range lo <= value <= hi, value > above."""
    limits = dict(help=help, lo=lo, hi=hi, above=above, choices=choices)
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True)
class Config:
    # what is trained
    model: str = opt("tiny", "tiny, tiny-ddpm, sd15, sd3, flux, a hub id or a local folder")
    method: str = opt("treegrpo", "a row of the table of presets; any other flag overrides it")
    reward: tuple[str, ...] = opt(("shapes",), "name[:weight] or module:function[:weight], several allowed")
    prompts: str = opt("", "file of prompts, .txt (one a line) or .jsonl (key 'prompt'); empty = built in")
    prompts_per_iteration: int = opt(8, "prompts per iteration, over all processes", lo=1)
    iterations: int = opt(120, "training iterations", lo=1)
    seed: int = opt(0, "seed of prompts, windows and noise", lo=0)
    out: str = opt("", "run folder; empty = runs/MODEL-METHOD-SEED")
    resume: str = opt("", "run folder to continue, bit for bit")
    overwrite: bool = opt(False, "replace what an existing run folder holds")
    device: str = opt("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = opt("fp32", "precision of the frozen weights; sampler maths is always fp32",
                     choices=("fp32", "bf16", "fp16"))
    # the sampler
    steps: int = opt(10, "denoising steps T", lo=2, hi=999)
    resolution: int = opt(16, "image side in pixels", lo=8)
    guidance: float = opt(1.0, "classifier-free guidance scale, the same in sampling and training", lo=1.0)
    sde: str = opt("flow", "SDE of flow models (epsilon and v models: DDIM)", choices=("flow", "cps", "dance"))
    noise_level: float = opt(0.7, "noise level a of the branching steps (DDIM, dance: eta)", above=0)
    noise_growth: float = opt(0.0, "beta: the noise level grows to (1 + beta) a over the window (D eq. 6)", above=-1)
    # the tree
    roots: int = opt(1, "independent initial noises per prompt", lo=1)
    branch: tuple[int, ...] = opt((3,), "children k at each window step; the last value repeats", lo=1)
    depth: int = opt(3, "window length w in steps; 0 = all steps but the last", lo=0)
    window_mode: str = opt("random", "how the window's start moves", choices=("random", "sliding", "fixed"))
    window_ratio: float = opt(0.5, "random: r of the truncated geometric law, small = early (eq. 7)", above=0, hi=1)
    window_start: int = opt(0, "fixed, sliding: the (first) start", lo=0)
    window_stride: int = opt(1, "sliding: steps the start moves by", lo=1)
    window_every: int = opt(1, "sliding: iterations between moves", lo=1)
    tail_steps: int = opt(0, "ODE steps after the window, coarser than the grid; 0 = the grid's", lo=0)
    # credit
    group: str = opt("prompt", "leaves compared with each other", choices=("prompt", "root"))
    backup: str = opt("mean", "children's weights: equal, or softmax log-probability (eq. 11)",
                      choices=("mean", "prob"))
    sibling_norm: str = opt("center", "advantage of an edge among its siblings",
                            choices=("center", "std", "none", "depth"))
    adv_clip: float = opt(5.0, "advantages are clipped to plus or minus this", above=0)
    # the update
    clip: float = opt(0.0256, "clip range per sqrt(D): the ratio is clipped at 1 +- clip / sqrt(D)", above=0)
    clip_min: float = opt(0.0, "with clip_max: reward-conditioned clip range (D eq. 11), per sqrt(D)", lo=0)
    clip_max: float = opt(0.0, "upper end of the reward-conditioned clip range; 0 = use clip", lo=0)
    clip_eta: float = opt(1.0, "its sensitivity to the advantage", lo=0)
    inner_epochs: int = opt(1, "optimiser steps per rollout, each on the whole tree", lo=1)
    train_fraction: float = opt(1.0, "share of the window's steps that is trained, drawn anew", above=0, hi=1)
    step_weight: str = opt("none", "weight of a step's loss: none, or its noise std", choices=("none", "std"))
    loss_reduce: str = opt("edges", "mean over edges, leaf-weighted mean per layer, or sum (eq. 12)",
                           choices=("edges", "layer", "sum"))
    kl: float = opt(0.0, "weight of the KL divergence to the reference model", lo=0)
    sft: float = opt(0.0, "lambda of LayerTuning: imitate the best path's velocity (D eq. 13)", lo=0)
    lr: float = opt(1e-4, "learning rate of AdamW", above=0)
    lr_schedule: str = opt("constant", "learning rate over the run", choices=("constant", "linear", "cosine"))
    weight_decay: float = opt(0.01, "weight decay of AdamW", lo=0)
    max_grad_norm: float = opt(1.0, "gradients are clipped to this norm", above=0)
    ema: float = opt(0.0, "decay of the weight average that is evaluated and exported; 0 = off", lo=0, hi=0.9999)
    lora_rank: int = opt(32, "LoRA rank", lo=1)
    lora_alpha: int = opt(64, "LoRA alpha; the update is scaled by alpha / rank", lo=1)
    full: bool = opt(False, "train all weights of the denoiser instead of a LoRA")
    grad_checkpointing: bool = opt(False, "recompute activations: less memory, about 30 % slower")
    micro_batch: int = opt(128, "most nodes in one denoiser call; bounds memory, not results", lo=1)
    # bookkeeping
    eval_every: int = opt(10, "iterations between evaluations with the full ODE sampler", lo=1)
    eval_images: int = opt(256, "images per evaluation, fixed prompts and noise", lo=1)
    save_every: int = opt(10, "iterations between checkpoints", lo=1)
    track: str = opt("none", "also send metrics to a tracker", choices=("none", "tensorboard", "wandb"))
    plan: bool = opt(False, "print what a run would do and what it would cost, then stop")

    @property
    def window(self) -> int:
        """Window length w with depth = 0 resolved."""
        return self.depth or self.steps - 1

    @property
    def folder(self) -> Path:
        name = Path(self.model).name if "/" in self.model else self.model
        return Path(self.out or f"runs/{name}-{self.method}-{self.seed}")


FLAT = dict(branch=(1,), depth=0, window_mode="fixed", sibling_norm="none")  # chains of stochastic steps
FAST = dict(tail_steps=2, inner_epochs=2)
PRESETS = {  # design choices of the published methods, as rows of one table; README gives the sources
    "treegrpo": {},
    "treegrpo-paper": dict(sibling_norm="none", backup="prob", loss_reduce="sum"),
    "treegrpo-fast": FAST,
    "dynamic-treerpo": dict(branch=(2,), depth=4, window_mode="sliding", noise_growth=0.5, clip_min=0.0128,
                            clip_max=0.0512, inner_epochs=2, sft=0.1),
    "flow-grpo": FLAT | dict(roots=24, kl=0.04),
    "dancegrpo": FLAT | dict(branch=(12, 1), sde="dance", noise_level=0.3, train_fraction=0.6),
    "mixgrpo": dict(branch=(12, 1), depth=4, window_mode="sliding", window_every=25, sibling_norm="none"),
    "branchgrpo": dict(branch=(2, 1, 1, 2, 1, 1, 2, 1, 1, 2, 1), depth=0, window_mode="fixed", steps=20,
                       sde="dance", noise_level=0.3, sibling_norm="depth", clip=0.256),
    "tempflow-grpo": dict(roots=4, branch=(6,), depth=1, group="root", step_weight="std", sibling_norm="none"),
    "ddpo": FLAT | dict(roots=24, noise_level=1.0),
}


def nearest(value: str, allowed) -> str:
    close = difflib.get_close_matches(value, list(allowed), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_range(name: str, value, meta) -> None:
    """One line for a value outside the limits given to `opt`."""
    flag, lo, hi, above, choices = "--" + name.replace("_", "-"), *(meta[k] for k in ("lo", "hi", "above", "choices"))
    for v in value if isinstance(value, tuple) else (value,):
        if choices and v not in choices:
            raise UsageError(f"{flag} {v}: allowed are {', '.join(choices)}{nearest(v, choices)}")
        bounds = [f"> {above}"] * (above is not None) + [f">= {lo}"] * (lo is not None) + [f"<= {hi}"] * (hi is not None)
        good = ((above is None or v > above) and (lo is None or v >= lo) and (hi is None or v <= hi))
        if bounds and not (good and math.isfinite(v)):  # NaN fails every comparison
            raise UsageError(f"{flag} {v}: must be finite and {' and '.join(bounds)}")


def check_config(cfg: Config) -> None:
    """Refuse what cannot work, before any model is loaded."""
    for f in dataclasses.fields(cfg):
        check_range(f.name, getattr(cfg, f.name), f.metadata)
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    devices = ["auto", "cpu", *["cuda"][:len(gpus)], *gpus, *["mps"][:torch.backends.mps.is_available()]]
    if cfg.device not in devices:
        raise UsageError(f"--device {cfg.device}: available are {', '.join(devices)}")
    T, w = cfg.steps, cfg.window
    if w > T - 1:
        raise UsageError(f"--depth {w}: the window must end before the last of {T} steps; allowed 1 to {T - 1}")
    if cfg.window_mode != "random" and cfg.window_start > T - w - 1:
        raise UsageError(f"--window-start {cfg.window_start}: a window of {w} in {T} steps starts at 0 to {T - w - 1}")
    leaves = math.prod(s.children for s in schedule(cfg, 0)) * (cfg.roots if cfg.group == "prompt" else 1)
    if leaves < 2:
        raise UsageError(f"--branch {cfg.branch[0]} --roots {cfg.roots} --group {cfg.group}: one leaf per group, "
                         "nothing to compare it with; allowed are 2 or more leaves per group")
    if len(cfg.branch) > w:
        raise UsageError(f"--branch {' '.join(map(str, cfg.branch))}: at most one value per window step, {w}")
    bounded = "ddim" if is_ddim(cfg.model) else cfg.sde
    worst = max(s.noise for s in schedule(cfg, 0))
    if bounded in ("ddim", "cps") and worst > 1 + 1e-9:
        raise UsageError(f"--noise-level {cfg.noise_level} --noise-growth {cfg.noise_growth}: reaches {worst:.3g}; "
                         f"{bounded} allows at most 1")
    names = [parse_reward(r)[0] for r in cfg.reward]
    if len(set(names)) < len(names):
        raise UsageError(f"--reward {' '.join(cfg.reward)}: names a reward twice; allowed is once each")
    if cfg.clip_min > cfg.clip_max:
        raise UsageError(f"--clip-min {cfg.clip_min}: must be <= --clip-max {cfg.clip_max}")


# ======================================================================================
# 2. Schedule: one list of steps expresses every method
# ======================================================================================
@dataclasses.dataclass(frozen=True)
class Step:
    """One denoising step from grid point i to grid point j > i."""

    i: int
    j: int
    children: int  # k, samples drawn per node
    noise: float  # noise level a; 0 = deterministic, then children = 1
    train: bool


def stream(*key) -> random.Random:
    """A random stream of its own for each key; the same on every machine (SHA-512 of the key)."""
    return random.Random("/".join(map(str, key)))


def window_probs(T: int, w: int, r: float) -> Tensor:
    """Law of the window's start: Pr[i] = (1-r) r^i / (1-r^(T-w)), i = 0 .. T-w-1 (eq. 7) -> (T-w,)."""
    p = torch.tensor(r, dtype=torch.float64) ** torch.arange(T - w)
    return p / p.sum()


def window_start(cfg: Config, iteration: int) -> int:
    """First step of the window in this iteration (0-based)."""
    positions = cfg.steps - cfg.window
    if cfg.window_mode == "fixed":
        return cfg.window_start
    if cfg.window_mode == "sliding":
        return (cfg.window_start + iteration // cfg.window_every * cfg.window_stride) % positions
    probs = window_probs(cfg.steps, cfg.window, cfg.window_ratio).tolist()
    return stream(cfg.seed, iteration, "window").choices(range(positions), probs)[0]


def schedule(cfg: Config, iteration: int) -> list[Step]:
    """ODE prefix, branching window, ODE tail. The last step is always deterministic."""
    T, w, start = cfg.steps, cfg.window, window_start(cfg, iteration)
    trained = stream(cfg.seed, iteration, "train").sample(range(w), max(1, round(cfg.train_fraction * w)))
    steps = [Step(i, i + 1, 1, 0.0, False) for i in range(start)]
    for n in range(w):
        growth = 1 + cfg.noise_growth * n / max(w - 1, 1)  # g(j), linear in the depth (D eq. 6)
        k = cfg.branch[min(n, len(cfg.branch) - 1)]
        steps.append(Step(start + n, start + n + 1, k, cfg.noise_level * growth, n in trained))
    end = start + w
    tail = min(cfg.tail_steps or T, T - end)
    points = [end + round((T - end) * m / tail) for m in range(tail + 1)]
    return steps + [Step(i, j, 1, 0.0, False) for i, j in zip(points, points[1:])]


def ode_schedule(T: int) -> list[Step]:
    return [Step(i, i + 1, 1, 0.0, False) for i in range(T)]


def nfe(steps: list[Step], roots: int = 1, inner_epochs: int = 1, kl: bool = False) -> tuple[int, int]:
    """Denoiser evaluations per prompt: (to sample, to train). Double under CFG.

    One evaluation serves all children of a node. With `kl` each trained node is evaluated once
    more by the reference. The gradient passes are the training evaluations without those.
    """
    nodes, sample, train = roots, 0, 0
    for step in steps:
        sample += nodes
        train += nodes * step.train
        nodes *= step.children
    return sample, train * inner_epochs * (2 if kl else 1)


def forward_equivalents(steps: list[Step], cfg: Config) -> int:
    """Cost of an iteration per prompt in forward passes; a backward pass counts as 2."""
    sample, train = nfe(steps, cfg.roots, cfg.inner_epochs)
    return sample + train * (4 if cfg.kl else 3)


def plan(cfg: Config, dims: int | None = None) -> str:
    """What an iteration does and costs, beside flat GRPO with as many leaves."""
    T, starts = cfg.steps, cfg.steps - cfg.window
    fixed = [schedule(dataclasses.replace(cfg, window_mode="fixed", window_start=i), 0) for i in range(starts)]
    if cfg.window_mode == "fixed":
        fixed = fixed[cfg.window_start:cfg.window_start + 1]
    probs = window_probs(T, cfg.window, cfg.window_ratio).tolist() if cfg.window_mode == "random" else None
    cost = [nfe(s, cfg.roots, cfg.inner_epochs, cfg.kl > 0) for s in fixed]
    mean = sum(p * c[0] for p, c in zip(probs or [1 / len(cost)] * len(cost), cost))
    leaves = cfg.roots * math.prod(s.children for s in fixed[0])
    double = " (x 2 for guidance)" if cfg.guidance > 1 else ""
    lines = [f"{cfg.method} on {cfg.model}: {T} steps, window {cfg.window} ({cfg.window_mode}), "
             f"k {'-'.join(map(str, cfg.branch))}, roots {cfg.roots}, {cfg.prompts_per_iteration} prompts/iteration",
             f"  per prompt: {leaves} leaves, {cost[0][1] // cfg.inner_epochs} trained nodes",
             f"  denoiser evaluations per prompt{double}: {mean:.0f} to sample "
             f"(by window start: {' '.join(str(c[0]) for c in cost)}), {cost[0][1]} to train",
             f"  flat GRPO with {leaves} leaves: {leaves * T} to sample, {leaves * (T - 1)} to train"]
    if dims:
        lo, hi = (cfg.clip_min, cfg.clip_max) if cfg.clip_max else (cfg.clip, cfg.clip)
        span = f"{lo / dims**0.5:.2e}" + (f" .. {hi / dims**0.5:.2e}" if hi > lo else "")
        lines.append(f"  clip range of the ratio: 1 +- {span} (D = {dims:,})")
    return "\n".join(lines)


# ======================================================================================
# 3. Samplers: mean and std of one step. x latent, v velocity (noise - data), sigma in [0, 1],
#    alpha the cumulative product of DDPM. Pure; float32 or float64 in, the same out.
# ======================================================================================
def scalars(x: Tensor, *values) -> list[Tensor]:
    """Python floats or 0-d tensors -> 0-d CPU tensors of x's precision."""
    return [torch.as_tensor(v, dtype=x.dtype, device="cpu") for v in values]


def flow_sde_step(x, v, sigma, sigma_next, noise_level, sigma_cap) -> tuple[Tensor, Tensor]:
    """SDE with the marginals of the flow ODE; noise_level 0 is the Euler ODE exactly.

    x, v (N, ...); sigma > sigma_next; sigma_cap: the grid's second sigma, which removes the
    singularity of the rate s = a sqrt(sigma / (1 - sigma)) at sigma = 1.
    Returns mean (N, ...), std (). Source: Flow-GRPO (arXiv 2505.05470).
    """
    sigma, sigma_next, a, cap = scalars(x, sigma, sigma_next, noise_level, sigma_cap)
    dt = sigma_next - sigma  # < 0
    rate = a * (sigma / (1 - torch.minimum(sigma, cap))).sqrt()
    half = rate**2 / (2 * sigma)
    mean = x * (1 + half * dt) + v * ((1 + half * (1 - sigma)) * dt)
    return mean, rate * (-dt).sqrt()


def dance_sde_step(x, v, sigma, sigma_next, eta) -> tuple[Tensor, Tensor]:
    """SDE of constant rate eta; shapes as `flow_sde_step`. Source: DanceGRPO (arXiv 2505.07818)."""
    sigma, sigma_next, eta = scalars(x, sigma, sigma_next, eta)
    dt = sigma_next - sigma
    x0 = x - sigma * v
    score = -(x - (1 - sigma) * x0) / sigma**2
    return x + v * dt - 0.5 * eta**2 * score * dt, eta * (-dt).sqrt()


def cps_step(x, v, sigma, sigma_next, noise_level) -> tuple[Tensor, Tensor]:
    """Coefficients-preserving sampling: a share of the next noise is drawn anew; noise_level <= 1.

    The std does not shrink with the step, so for a denoiser that predicts posterior means the
    marginals are too narrow at any T (exact on a point mass). Source: arXiv 2509.05952.
    """
    sigma, sigma_next, a = scalars(x, sigma, sigma_next, noise_level)
    std = sigma_next * torch.sin(a * (math.pi / 2))
    x0, x1 = x - sigma * v, x + (1 - sigma) * v  # predicted data and noise
    return (1 - sigma_next) * x0 + (sigma_next**2 - std**2).clamp(min=0).sqrt() * x1, std


def ddim_step(x, eps, alpha, alpha_next, eta) -> tuple[Tensor, Tensor]:
    """DDIM (arXiv 2010.02502, eq. 12, 16); eta 0 deterministic, eta 1 ancestral DDPM; eta <= 1."""
    alpha, alpha_next, eta = scalars(x, alpha, alpha_next, eta)
    x0 = (x - (1 - alpha).sqrt() * eps) / alpha.sqrt()
    std = eta * ((1 - alpha_next) / (1 - alpha) * (1 - alpha / alpha_next)).sqrt()
    return alpha_next.sqrt() * x0 + (1 - alpha_next - std**2).clamp(min=0).sqrt() * eps, std


def gaussian_log_prob(sample, mean, std, reduce: str = "mean") -> Tensor:
    """log N(sample; mean, std^2) -> (N,), the *mean* over the D dimensions, or their sum.

    The field's convention is the mean. The probability ratio formed from it is the D-th root of
    the true one, which is why clip ranges are tiny and scale as 1 / sqrt(D).
    """
    log_prob = -(((sample - mean) / std) ** 2) / 2 - torch.log(std) - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob.flatten(1)
    return log_prob.mean(1) if reduce == "mean" else log_prob.sum(1)


def gaussian_kl(mean, mean_ref, std) -> Tensor:
    """KL(N(mean, std^2) || N(mean_ref, std^2)) per dimension -> (N,)."""
    return ((mean - mean_ref) ** 2).flatten(1).mean(1) / (2 * std**2)


# ======================================================================================
# 4. Tree and rollout
# ======================================================================================
@dataclasses.dataclass
class Level:
    """One stochastic step for all prompts: N nodes, E edges. Node n descends from edge n above.

    Everything an edge needs to be scored again, on the CPU in float32.
    """

    step: Step
    x: Tensor  # (N, C, H, W) latents where the step starts
    pred: Tensor  # (N, C, H, W) the model's output there, at rollout time
    prompt: Tensor  # (N,) index of the prompt
    parent: Tensor  # (E,) node that each edge leaves from
    sample: Tensor  # (E, C, H, W) latents where the edge ends
    log_prob_old: Tensor  # (E,)
    std: Tensor  # () of the step's noise


@dataclasses.dataclass
class Tree:
    """A forest: the trees of all prompts. Irregular trees work; edges of a node need not be adjacent."""

    levels: list[Level]
    leaves: Tensor  # (L, C, H, W) final latents; leaf n descends from edge n of the last level
    prompt: Tensor  # (L,) prompt of each leaf
    root: Tensor  # (L,) root of each leaf

    def path(self, leaf: int) -> list[int]:
        """Edges from the root to a leaf, one per level."""
        edges = [leaf]
        for level in reversed(self.levels[1:]):
            edges.append(int(level.parent[edges[-1]]))
        return edges[::-1]

    def children(self, node: tuple[int, int]) -> list[int]:
        """Edges that leave node n of level l, for node = (l, n)."""
        return (self.levels[node[0]].parent == node[1]).nonzero().flatten().tolist()


def node_batches(nodes: int, parent: Tensor, micro_batch: int):
    """Yield (slice of nodes, their edges (e,), each edge's node within the slice (e,))."""
    for start in range(0, nodes, micro_batch):
        stop = min(start + micro_batch, nodes)
        edges = ((parent >= start) & (parent < stop)).nonzero().flatten()
        yield slice(start, stop), edges, parent[edges] - start


def tree_noise(key: tuple, slots: list[int], shape: tuple):
    """Noise that depends on the key, the prompt's slot and the level only -> draw(level, prompt (N,)).

    Drawn on the CPU, so micro-batch, device and number of processes do not change it.
    """
    def draw(level: int, prompt: Tensor) -> Tensor:  # prompt is sorted -> (N, C, H, W)
        blocks = []
        for p, n in zip(*(t.tolist() for t in prompt.unique_consecutive(return_counts=True))):
            g = torch.Generator().manual_seed(stream(*key, slots[p], level).getrandbits(63))
            blocks.append(torch.randn(n, *shape, generator=g))
        return torch.cat(blocks)
    return draw


def transition(policy, x, prompt, step: Step, cond) -> tuple[Tensor, Tensor, Tensor]:
    """One denoiser evaluation per node, shared by its children -> pred, mean (N, C, H, W), std ()."""
    cond = {k: v[prompt].to(policy.device) for k, v in cond.items()}
    x = x.to(policy.device)
    pred = policy.predict(x, step.i, cond)
    return pred, *policy.step(x, pred, step.i, step.j, step.noise)


@torch.no_grad()
def rollout(policy, cond, prompt: Tensor, steps: list[Step], draw, micro_batch: int) -> Tree:
    """Grow the trees of all prompts level by level.

    cond: dict of tensors (P, ...); prompt (R,): the prompt of each root, sorted; draw(level,
    prompt) -> noise. With ODE steps only this is a plain sampler whose leaves are the result.
    """
    x, root, levels = draw(0, prompt), torch.arange(len(prompt)), []
    for step in steps:
        parent = torch.arange(len(x)).repeat_interleave(step.children)
        noise = draw(len(levels) + 1, prompt[parent]) if step.noise else None
        preds, samples, log_probs = [], [], []
        for nodes, edges, local in node_batches(len(x), parent, micro_batch):
            pred, mean, std = transition(policy, x[nodes], prompt[nodes], step, cond)
            check_finite("denoiser output", pred, step.i)
            sample = mean[local]
            if step.noise:
                if not std > 0:
                    raise NumericalError(f"std {std.item()} at step {step.i} with noise level {step.noise}")
                sample = sample + std * noise[edges].to(policy.device)
                log_probs.append(gaussian_log_prob(sample, mean[local], std).cpu())
            preds.append(pred.cpu())
            samples.append(sample.cpu())
        sample = torch.cat(samples)
        if step.noise:
            levels.append(Level(step, x, torch.cat(preds), prompt, parent, sample, torch.cat(log_probs), std))
        x, prompt, root = sample, prompt[parent], root[parent]
    return Tree(levels, x, prompt, root)


def check_finite(what: str, value: Tensor, step: int | None = None) -> None:
    if not torch.isfinite(value).all():
        at = "" if step is None else f" at step {step}"
        raise NumericalError(f"{what} is not finite{at}")


# ======================================================================================
# 5. Credit: rewards of leaves -> one advantage per edge. Pure functions of a tree.
# ======================================================================================
MIN_SPREAD = 1e-6  # below this spread a group tells nothing: its advantages are exactly 0


def group_stats(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population std and size of each value's group; values, groups (n,) -> 3 x (n,)."""
    dtype, values = values.dtype, values.double()  # else equal rewards of 21.3 have a spread of 2e-6
    zeros = values.new_zeros(int(groups.max()) + 1)
    count = zeros.index_add(0, groups, torch.ones_like(values))
    mean = zeros.index_add(0, groups, values) / count
    var = zeros.index_add(0, groups, (values - mean[groups]) ** 2) / count
    return mean[groups].to(dtype), var.sqrt()[groups].to(dtype), count[groups].to(dtype)


def leaf_advantages(rewards: Tensor, groups: Tensor, weights=(1.0,)) -> Tensor:
    """A = (S - mean) / std within each group (eq. 9) -> (L,).

    rewards (L,) or (R, L): several rewards are normalised one by one, then weighted and added.
    groups (L,): integer group of each leaf; a group of one is refused (ValueError).
    """
    total = torch.zeros_like(rewards[0] if rewards.ndim == 2 else rewards)
    for w, r in zip(weights, rewards.reshape(-1, rewards.shape[-1]), strict=True):
        mean, std, count = group_stats(r, groups)
        if (count < 2).any():
            raise ValueError("a group of one leaf has no advantage; groups need 2 or more leaves")
        total = total + w * torch.where(std < MIN_SPREAD, 0, (r - mean) / std.clamp(min=MIN_SPREAD))
    return total


def child_weights(level: Level, mode: str) -> Tensor:
    """Weights of sibling edges, 1 in sum: equal, or softmax of the stored log-probs (eq. 11) -> (E,)."""
    n, parent, score = len(level.x), level.parent, level.log_prob_old
    if mode == "mean":
        score = torch.zeros_like(score)
    top = score.new_full((n,), -math.inf).scatter_reduce(0, parent, score, "amax")
    w = (score - top[parent]).exp()
    return w / w.new_zeros(n).index_add(0, parent, w)[parent]


def backup(tree: Tree, leaf_adv: Tensor, weights: str = "mean") -> list[Tensor]:
    """Advantage of every edge: the weighted mean of those below it (eq. 10) -> per level (E,)."""
    value, adv = leaf_adv, []
    for level in reversed(tree.levels):
        adv.append(value)
        w = child_weights(level, weights).to(value)
        value = value.new_zeros(len(level.x)).index_add(0, level.parent, w * value)
    return adv[::-1]


def normalize_siblings(tree: Tree, adv: list[Tensor], mode: str = "center") -> list[Tensor]:
    """Compare each edge with its siblings -> per level (E,).

    none    the paper: the backed-up value as it is
    center  A - mean of the other siblings = k/(k-1) (A - mean): unbiased, the default
    std     zero mean, unit population std (at k = 2 only the sign is left)
    depth   zero mean, unit std over all edges of the prompt at that depth
    A group of one keeps its value (so chains are flat GRPO); spread below 1e-6 gives 0.
    """
    if mode == "none":
        return adv
    out = []
    for level, a in zip(tree.levels, adv):
        mean, std, k = group_stats(a, level.prompt[level.parent] if mode == "depth" else level.parent)
        scale = k / (k - 1).clamp(min=1) if mode == "center" else 1 / std.clamp(min=MIN_SPREAD)
        out.append(torch.where(k == 1, a, torch.where(std < MIN_SPREAD, 0, (a - mean) * scale)))
    return out


def edge_advantages(tree: Tree, rewards: Tensor, cfg: Config, weights=(1.0,)) -> list[Tensor]:
    """Reward backup, then normalisation per sibling group; rewards (L,) or (R, L) -> per level (E,)."""
    leaf = leaf_advantages(rewards, tree.root if cfg.group == "root" else tree.prompt, weights)
    adv = normalize_siblings(tree, backup(tree, leaf, cfg.backup), cfg.sibling_norm)
    return [a.clamp(-cfg.adv_clip, cfg.adv_clip) for a in adv]


# ======================================================================================
# 6. Clipped update
# ======================================================================================
def clipped_surrogate(log_prob, log_prob_old, adv, clip) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A), rho = exp(log_prob - log_prob_old) (eq. 12).

    All (E,); clip a float or one per edge. Returns the loss per edge, and per edge the ratio and
    whether the clip stopped its gradient on the lower or the upper side.
    """
    ratio = (log_prob - log_prob_old).exp()
    low, high = ratio < 1 - clip, ratio > 1 + clip
    loss = -torch.minimum(ratio * adv, torch.clamp(ratio, 1 - clip, 1 + clip) * adv)
    return loss, dict(ratio=ratio.detach(), low=low & (adv < 0), high=high & (adv > 0))


def clip_range(cfg: Config, adv: Tensor, dims: int):
    """Clip range of each edge for latents of `dims` values: constant, or wider for a better edge.

    D eq. 11: eps(A) = min + (max - min) sigmoid(eta A). A mean-reduced log-ratio shrinks like
    1 / sqrt(dims), hence the division.
    """
    if not cfg.clip_max:
        return cfg.clip / math.sqrt(dims)
    width = (cfg.clip_max - cfg.clip_min) * torch.sigmoid(cfg.clip_eta * adv)
    return (cfg.clip_min + width) / math.sqrt(dims)


def edge_weights(tree: Tree, cfg: Config) -> list[Tensor]:
    """Weight of each edge's loss, per level (E,), before division by `all_sum` of their total.

    edges: all alike; layer: an edge's share of the leaves; sum: eq. 12, a mean over prompts only.
    """
    share, out = torch.ones(len(tree.leaves)), []
    stds = [level.std.item() for level in tree.levels if level.step.train]
    for level in reversed(tree.levels):
        w = share if cfg.loss_reduce == "layer" else torch.ones_like(share)
        scale = level.std.item() * len(stds) / sum(stds) if cfg.step_weight == "std" else 1.0
        out.append(w * scale * level.step.train)
        share = torch.zeros(len(level.x)).index_add(0, level.parent, share)
    return out[::-1]


def layer_tuning_targets(tree: Tree, leaf_adv: Tensor) -> list[tuple[Tensor, Tensor]]:
    """LayerTuning (D eq. 13): per level the best node (N,) that each node imitates, and its weight (N,).

    The best path of a prompt ends at its first best leaf; the weight is that leaf's advantage, its
    lead over the group (our choice), and 0 at the best nodes. The target is the output the model
    had there in the rollout, so no denoiser evaluation is added.
    """
    best = {p: max((tree.prompt == p).nonzero().flatten().tolist(), key=lambda n: leaf_adv[n].item())
            for p in tree.prompt.unique().tolist()}
    out = []
    for l, level in enumerate(tree.levels):
        at = torch.zeros(int(tree.prompt.max()) + 1, dtype=torch.long)
        lead = torch.zeros(len(at))
        for p, leaf in best.items():
            at[p], lead[p] = level.parent[tree.path(leaf)[l]], leaf_adv[leaf]
        target = at[level.prompt]
        out.append((target, lead[level.prompt] * (target != torch.arange(len(target)))))
    return out


def micro_batch_loss(policy, level: Level, batch, cond, cfg: Config, adv, weight, tuning):
    """Loss of the edges of one micro-batch of nodes: a scalar, and statistics per edge."""
    nodes, edges, local = batch
    here = level.x[nodes], level.prompt[nodes], level.step, cond
    if cfg.kl:
        with torch.no_grad(), policy.reference():
            ref = transition(policy, *here)[1]
    pred, mean, std = transition(policy, *here)  # the same call as in the rollout: rho = 1 at first
    sample, old, adv, weight = (t[edges].to(mean.device) for t in (level.sample, level.log_prob_old, adv, weight))
    log_prob = gaussian_log_prob(sample, mean[local], std)
    loss, stats = clipped_surrogate(log_prob, old, adv, clip_range(cfg, adv, sample[0].numel()))
    if cfg.kl:
        stats["kl"] = gaussian_kl(mean, ref, std)[local]
        loss = loss + cfg.kl * stats["kl"]
    loss = (weight * loss).sum()
    if cfg.sft:
        target, lead = tuning
        gap = ((pred - level.pred[target[nodes]].to(pred.device)) ** 2).flatten(1).mean(1)
        loss = loss + cfg.sft * (lead[nodes].to(gap.device) * gap).sum()
    return loss, stats


def accumulate_gradients(policy, tree: Tree, adv, cond, cfg: Config, weights, tuning, scaler) -> dict:
    """One backward pass per micro-batch of nodes; the gradients add up to those of the whole tree."""
    stats = []
    for level, a, w, t in zip(tree.levels, adv, weights, tuning):
        if not level.step.train:
            continue
        for batch in node_batches(len(level.x), level.parent, cfg.micro_batch):
            loss, s = micro_batch_loss(policy, level, batch, cond, cfg, a, w, t)
            check_finite("loss", loss, level.step.i)
            scaler.scale(loss).backward()
            stats.append({k: v.detach().float().cpu() for k, v in s.items()})
    return {k: torch.cat([s[k] for s in stats]) for k in stats[0]}


def update(policy, tree: Tree, adv, leaf_adv, cond, cfg: Config, optimizer, scaler) -> list[dict]:
    """`inner_epochs` optimiser steps on one tree -> statistics of each."""
    weights, tuning = edge_weights(tree, cfg), layer_tuning_targets(tree, leaf_adv)
    total = torch.stack([w.sum() for w in weights]).sum()
    if cfg.loss_reduce == "sum":
        total = torch.tensor(float(len(tree.prompt.unique())))
    others = torch.stack([(t != torch.arange(len(t))).sum() for t, _ in tuning]).float()
    total, others = all_sum(total), all_sum(others).clamp(min=1)
    trained = sum(level.step.train for level in tree.levels)
    weights = [w / total for w in weights]
    tuning = [(t, lead / n / trained) for (t, lead), n in zip(tuning, others)]
    log = []
    for _ in range(cfg.inner_epochs):
        optimizer.zero_grad(set_to_none=False)
        stats = together(accumulate_gradients, policy, tree, adv, cond, cfg, weights, tuning, scaler)
        for p in policy.trainable:
            p.grad = all_sum(torch.zeros_like(p) if p.grad is None else p.grad)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(policy.trainable, cfg.max_grad_norm).item()
        if not math.isfinite(norm) and not scaler.is_enabled():
            raise NumericalError("gradient norm is not finite")
        scaler.step(optimizer)  # fp16: skipped, and the loss scale lowered, on overflow
        scaler.update()
        off = (stats["ratio"] - 1).abs()
        log.append(dict(ratio_mean=stats["ratio"].mean().item(), ratio_std=off.square().mean().sqrt().item(),
                        ratio_max=off.max().item(), clip_low=stats["low"].mean().item(),
                        clip_high=stats["high"].mean().item(), grad_norm=norm,
                        **({"kl": stats["kl"].mean().item()} if cfg.kl else {})))
    return log


# ======================================================================================
# 7. Many processes (torchrun): every rank grows the trees of its own prompts
# ======================================================================================
def world() -> tuple[int, int]:
    """(rank, number of processes)."""
    dist = torch.distributed
    ready = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)


def all_sum(value: Tensor) -> Tensor:
    """Sum over the processes; the value itself where there is one."""
    if world()[1] > 1:
        value = value.clone()
        torch.distributed.all_reduce(value)
    return value


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


# ======================================================================================
# 8. Models. A policy is what the method needs from a model.
# ======================================================================================
class Policy:
    """Protocol and shared parts. Subclasses give `encode`, `denoise`, `decode` and set:

    kind       what `denoise` predicts: "flow" (velocity), "eps" or "v"
    grid       (T+1,) float32: sigma for flow, cumulative alpha for eps and v, from noise to data
    shape      (C, H, W) of the latents; trainable: list of float32 parameters; device
    """

    kind = "flow"
    evaluations = 0  # latents the denoiser has seen, twice under guidance

    def encode(self, prompts: list[str]) -> dict[str, Tensor]:
        """Conditioning, tensors (P, ...); under guidance (P, 2, ...): unconditional, conditional."""
        raise NotImplementedError

    def denoise(self, x: Tensor, i: int, cond: dict[str, Tensor]) -> Tensor:
        """Raw model output (N, C, H, W) for latents x (N, C, H, W) at grid point i."""
        raise NotImplementedError

    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1]."""
        raise NotImplementedError

    def predict(self, x: Tensor, i: int, cond: dict[str, Tensor]) -> Tensor:
        """Model output with classifier-free guidance, float32; the same in sampling and training."""
        if not self.guided:
            self.evaluations += len(x)
            return self.denoise(x, i, cond).float()
        self.evaluations += 2 * len(x)
        pair = {k: v.transpose(0, 1).flatten(0, 1) for k, v in cond.items()}
        uncond, text = self.denoise(torch.cat([x, x]), i, pair).float().chunk(2)
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
        """Predicted clean latents, (N, C, H, W)."""
        a = self.grid[i]
        if self.kind == "flow":
            return x - a * pred
        return (x - (1 - a).sqrt() * pred) / a.sqrt() if self.kind == "eps" else a.sqrt() * x - (1 - a).sqrt() * pred

    def reference(self):
        """Context in which the denoiser is the untrained one."""
        return swapped(self.trainable, self.initial)


@contextlib.contextmanager
def swapped(parameters: list[nn.Parameter], values: list[Tensor]):
    """Context in which the parameters hold other values."""
    kept = [p.data for p in parameters]
    for p, v in zip(parameters, values):
        p.data = v
    try:
        yield
    finally:
        for p, v in zip(parameters, kept):
            p.data = v


# ---- the tiny world: captions "a red circle", 16 x 16 pixels, trained at first use -------------
COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.7, 0.2), "blue": (0.15, 0.25, 0.9), "yellow": (0.95, 0.8, 0.1)}
SHAPES = ("circle", "square", "triangle", "cross")
CAPTIONS = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
PLACES = [(y, x) for y in (6, 10) for x in (6, 10)]  # centres
TINY = dict(width=96, blocks=3, heads=4, patch=4, wrong=0.45, steps=1500, batch=64, lr=1e-2)


def draw_caption(caption: str) -> Tensor:
    """Clean drawings of a caption at every place -> (4, 3, 16, 16) in [0, 1]."""
    _, colour, shape = caption.split()
    line = torch.arange(16) + 0.5
    drawings = []
    for cy, cx in PLACES:
        dy, dx = (line - cy)[:, None].expand(16, 16), (line - cx)[None].expand(16, 16)
        mask = {"circle": dy**2 + dx**2 < 30, "square": (dy.abs() < 5) & (dx.abs() < 5),
                "triangle": (dx.abs() < (dy + 6) / 2) & (dy.abs() < 5.5),
                "cross": (torch.minimum(dy.abs(), dx.abs()) < 1.6) & (torch.maximum(dy.abs(), dx.abs()) < 5.5)}[shape]
        ink, paper = torch.tensor(COLOURS[colour]).view(3, 1, 1), 0.97
        drawings.append(torch.where(mask, ink, paper))
    return torch.stack(drawings)


class Block(nn.Module):
    """Transformer block whose normalisation is modulated by the condition (DiT, adaLN-zero)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.ada = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x, c):  # x (N, L, W), c (N, W)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + gate1 * self.out(y.transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class TinyDiT(nn.Module):
    """A diffusion transformer on 4 x 4 patches, conditioned on time and the two words of a caption."""

    def __init__(self, width: int, blocks: int, heads: int, patch: int):
        super().__init__()
        self.patch, n = patch, 16 // patch
        self.embed = nn.Linear(3 * patch**2, width)
        self.place = nn.Parameter(torch.randn(n * n, width))
        self.words = nn.Embedding(len(COLOURS) + len(SHAPES), width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, 3 * patch**2)

    def forward(self, x, time, words):  # x (N, 3, 16, 16), time (N,) in [0, 1], words (N, 2)
        p, freq = self.patch, torch.logspace(0, 1.5, self.place.shape[1] // 2, device=x.device)
        wave = torch.cat([(time[:, None] * freq).cos(), (time[:, None] * freq).sin()], 1)
        c = self.time(wave) + self.words(words).sum(1)
        h = self.embed(F.pixel_unshuffle(x, p).flatten(2).transpose(1, 2)) + self.place
        for block in self.blocks:
            h = block(h, c)
        h = self.head(F.layer_norm(h, h.shape[-1:])).transpose(1, 2)
        return F.pixel_shuffle(h.unflatten(2, (16 // p, 16 // p)), p)


def ddpm_alphas() -> Tensor:
    """Cumulative alphas of Stable Diffusion 1.5's noise schedule -> (1000,) float32."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(0).float()


def caption_words(caption: str) -> list[int]:
    if caption not in CAPTIONS:
        raise UsageError(f"prompt {caption!r}: the tiny world knows a {'|'.join(COLOURS)} {'|'.join(SHAPES)}")
    names = [*COLOURS, *SHAPES]
    return [names.index(w) for w in caption.split()[1:]]


def pretrain(kind: str) -> dict[str, Tensor]:
    """Train the tiny base: 45 % of its captions are wrong, as many web captions are. About a minute."""
    from tqdm import tqdm

    gen = torch.Generator().manual_seed(0)
    images = torch.stack([draw_caption(c) for c in CAPTIONS]) * 2 - 1  # (16, 4, 3, 16, 16)
    words = torch.tensor([caption_words(c) for c in CAPTIONS])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = TinyDiT(*(TINY[k] for k in ("width", "blocks", "heads", "patch")))
    optimizer = torch.optim.AdamW(net.parameters(), lr=TINY["lr"], weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, TINY["lr"], TINY["steps"], pct_start=0.1)
    alphas, n, N = ddpm_alphas(), len(CAPTIONS), TINY["batch"]
    for _ in tqdm(range(TINY["steps"]), desc=f"training the {kind} base, once", unit="step"):
        true = torch.randint(n, (N,), generator=gen)
        wrong = torch.rand(N, generator=gen) < TINY["wrong"]
        caption = (true + wrong * torch.randint(1, n, (N,), generator=gen)) % n
        x0 = images[true, torch.randint(len(PLACES), (N,), generator=gen)]
        noise, u = torch.randn(x0.shape, generator=gen), torch.rand(N, generator=gen)
        if kind == "tiny":
            s = u.view(-1, 1, 1, 1)
            x, target = (1 - s) * x0 + s * noise, noise - x0
        else:
            t = (u * 1000).long()
            a, u = alphas[t].view(-1, 1, 1, 1), t / 1000
            x, target = a.sqrt() * x0 + (1 - a).sqrt() * noise, noise
        loss = F.mse_loss(net(x, u, words[caption]), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return net.state_dict()


class TinyPolicy(Policy):
    """The tiny world: `tiny` is a flow model, `tiny-ddpm` predicts epsilon and is sampled by DDIM."""

    guided, shape = False, (3, 16, 16)

    def __init__(self, cfg: Config, device: torch.device):
        self.cfg, self.device = cfg, device
        self.kind = "flow" if cfg.model == "tiny" else "eps"
        self.net = TinyDiT(*(TINY[k] for k in ("width", "blocks", "heads", "patch")))
        self.net.load_state_dict(tiny_base(cfg.model))
        self.net.to(device).eval()
        self.trainable = list(self.net.parameters())
        self.initial = [p.detach().clone() for p in self.trainable]
        self.times = torch.linspace(1, 0, cfg.steps + 1)
        self.grid = self.times
        if self.kind == "eps":  # SD1.5's "leading" spacing with offset 1
            t = torch.arange(cfg.steps - 1, -1, -1) * (1000 // cfg.steps) + 1
            alphas = ddpm_alphas()
            self.times, self.grid = t / 1000, torch.cat([alphas[t], alphas[:1]])

    def encode(self, prompts):
        return {"words": torch.tensor([caption_words(p) for p in prompts])}

    def denoise(self, x, i, cond):
        return self.net(x, self.times[i].to(x.device).expand(len(x)), cond["words"])

    def decode(self, latents):
        return (latents.to(self.device) / 2 + 0.5).clamp(0, 1)

    def export(self, folder: Path) -> None:
        """Write the weights for use elsewhere."""
        save_atomic(self.net.state_dict(), folder / "model.pt")

    def restore(self, folder: Path) -> None:
        """Read what `export` wrote."""
        self.net.load_state_dict(torch.load(folder / "model.pt", weights_only=True))


def tiny_base(kind: str) -> dict[str, Tensor]:
    """Weights of the tiny base, from the user's cache or trained now."""
    key = hashlib.sha256(json.dumps([kind, TINY, CAPTIONS, PLACES]).encode()).hexdigest()[:12]
    path = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "treegrpo" / f"{kind}-{key}.pt"
    if not path.exists():
        save_atomic(pretrain(kind), path)
    return torch.load(path, weights_only=True)


FAMILIES = {  # how a model is loaded, and the flags whose default depends on it
    "tiny": (TinyPolicy, {}),
    "tiny-ddpm": (TinyPolicy, dict(noise_level=1.0)),
}


def family(model: str) -> str:
    if model in FAMILIES:
        return model
    raise UsageError(f"--model {model}: allowed are {', '.join(FAMILIES)}{nearest(model, FAMILIES)}")


def is_ddim(model: str) -> bool:
    return family(model) == "tiny-ddpm"


# ======================================================================================
# 9. Rewards: fn(images (B, 3, H, W) in [0, 1], prompts) -> (B,)
# ======================================================================================
def shapes_reward(device):
    """exp(-16 d), d the mean squared distance to the nearest clean drawing of the caption."""
    drawings = {c: draw_caption(c).to(device) for c in CAPTIONS}

    def score(images: Tensor, prompts: list[str]) -> Tensor:
        images = F.interpolate(images, (16, 16), mode="area")
        want = torch.stack([drawings[p] for p in prompts])  # (B, 4, 3, 16, 16)
        return torch.exp(-16 * ((images[:, None] - want) ** 2).mean((2, 3, 4)).amin(1))
    return score


REWARDS = {"shapes": shapes_reward}


def parse_reward(spec: str) -> tuple[str, float]:
    """'name', 'name:0.8', 'module:function' or 'module:function:0.8' -> (name, weight)."""
    name, _, last = spec.rpartition(":")
    try:
        weight = float(last)
    except ValueError:
        name, weight = spec, 1.0
    if not math.isfinite(weight) or (":" not in name and name not in REWARDS):
        raise UsageError(f"--reward {spec}: allowed are {', '.join(REWARDS)} or module:function, each with "
                         f"an optional :weight{nearest(name, REWARDS)}")
    return name, weight


def load_reward(name: str, device):
    if name in REWARDS:
        return REWARDS[name](device)
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise UsageError(f"--reward {name}: {e}") from None


def score(rewards: dict, images: Tensor, prompts: list[str]) -> Tensor:
    """All rewards of a batch of images -> (R, B) float32 on the CPU, checked."""
    check_finite("image", images)
    out = []
    for name, function in rewards.items():
        try:
            value = function(images, prompts)
        except Exception as e:
            raise RewardError(f"reward {name} raised {type(e).__name__}: {e}") from e
        if not (isinstance(value, Tensor) and value.shape == (len(images),) and value.is_floating_point()):
            got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise RewardError(f"reward {name} returned {got}; it must return a float tensor ({len(images)},)")
        bad = (~torch.isfinite(value)).nonzero().flatten().tolist()
        if bad:
            raise NumericalError(f"reward {name} is {value[bad[0]].item()} for the prompt {prompts[bad[0]]!r}")
        out.append(value.detach().float().cpu())
    return torch.stack(out)


# ======================================================================================
# 10. Training loop
# ======================================================================================
def read_prompts(path: str) -> list[str]:
    """Prompts of a .txt (one a line) or .jsonl file (key 'prompt'); blank lines are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--prompts {path}: {e}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.endswith(".jsonl"):
            try:
                line = json.loads(line)["prompt"]
                line.strip()
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UsageError(f"--prompts {path}: line {number} is not a JSON object with a text "
                                 "under 'prompt'") from None
        prompts.append(line.strip())
    if not prompts:
        raise UsageError(f"--prompts {path}: holds no prompt")
    return prompts


def draw_prompts(cfg: Config, prompts: list[str], iteration: int) -> tuple[list[int], list[str]]:
    """This process' prompt slots of an iteration and their prompts; each epoch is a permutation."""
    rank, size = world()
    slots, chosen = list(range(cfg.prompts_per_iteration))[rank::size], []
    for slot in slots:
        epoch, n = divmod(iteration * cfg.prompts_per_iteration + slot, len(prompts))
        order = stream(cfg.seed, epoch, "prompts").sample(range(len(prompts)), len(prompts))
        chosen.append(prompts[order[n]])
    return slots, chosen


def save_atomic(state, path: Path) -> None:
    """torch.save that leaves either the old file or the complete new one, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with open(part, "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


class Run:
    """Everything a run holds: policy, rewards, optimiser, weight average, where it is."""

    def __init__(self, cfg: Config):
        self.cfg, self.prompts = cfg, read_prompts(cfg.prompts) if cfg.prompts else list(CAPTIONS)
        if cfg.model.startswith("tiny"):
            for p in self.prompts:
                caption_words(p)
        for name in ("prompts_per_iteration", "eval_images"):
            if getattr(cfg, name) < world()[1]:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be >= {world()[1]}, "
                                 "one per process")
        device = torch.device(cfg.device if cfg.device != "auto" else
                              "cuda" if torch.cuda.is_available() else "cpu")
        specs = [parse_reward(r) for r in cfg.reward]
        self.weights = [w for _, w in specs]
        self.rewards = {name: load_reward(name, device) for name, _ in specs}
        self.policy = FAMILIES[family(cfg.model)][0](cfg, device)
        self.optimizer = torch.optim.AdamW(self.policy.trainable, cfg.lr, weight_decay=cfg.weight_decay)
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.dtype == "fp16")
        self.ema = [p.detach().clone() for p in self.policy.trainable] if cfg.ema else None
        self.iteration, self.best, self.best_iteration = 0, -math.inf, 0

    def averaged(self):
        """Context in which the policy has the weights that are evaluated and exported."""
        return swapped(self.policy.trainable, self.ema) if self.ema else contextlib.nullcontext()

    def state(self) -> dict:
        return dict(weights=[p.data for p in self.policy.trainable], ema=self.ema,
                    optimizer=self.optimizer.state_dict(), scaler=self.scaler.state_dict(),
                    iteration=self.iteration, best=self.best, best_iteration=self.best_iteration)

    def load(self, state: dict) -> None:
        for p, v in zip(self.policy.trainable, state["weights"], strict=True):
            p.data.copy_(v)
        for e, v in zip(self.ema or [], state["ema"] or [], strict=True):
            e.copy_(v)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.iteration, self.best, self.best_iteration = (state[k] for k in ("iteration", "best", "best_iteration"))

    def grow(self, iteration: int, slots: list[int], prompts: list[str]):
        """Trees of some prompts with the rewards (R, L) and images of their leaves."""
        cfg, policy = self.cfg, self.policy
        steps = schedule(cfg, iteration)
        draw = tree_noise((cfg.seed, iteration), slots, policy.shape)
        roots = torch.arange(len(prompts)).repeat_interleave(cfg.roots)
        tree = rollout(policy, policy.encode(prompts), roots, steps, draw, cfg.micro_batch)
        images = self.decode(tree.leaves)
        return tree, images, score(self.rewards, images, [prompts[p] for p in tree.prompt])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return torch.cat([self.policy.decode(x) for x in latents.split(self.cfg.micro_batch)])

    def sample(self, prompts: list[str], key: tuple, slots: list[int]) -> Tensor:
        """Images of the full ODE sampler, with noise that depends on the key and the slots only."""
        draw = tree_noise(key, slots, self.policy.shape)
        tree = rollout(self.policy, self.policy.encode(prompts), torch.arange(len(prompts)),
                       ode_schedule(self.cfg.steps), draw, self.cfg.micro_batch)
        return self.decode(tree.leaves)

    def measure(self) -> dict:
        """Mean reward of the full ODE sampler on fixed prompts and noise; exports the best weights."""
        rank, size = world()
        slots = list(range(self.cfg.eval_images))[rank::size]
        prompts = [self.prompts[n % len(self.prompts)] for n in slots]
        with self.averaged():
            rewards = together(lambda: score(self.rewards, self.sample(prompts, ("evaluation",), slots), prompts))
            mean = all_sum(torch.tensor(self.weights) @ rewards.sum(1)).item() / self.cfg.eval_images
            if mean > self.best:
                self.best, self.best_iteration = mean, self.iteration
                if rank == 0:
                    self.policy.export(self.cfg.folder / "best")
        return dict(eval=mean, best=self.best)

    def write(self, log: dict) -> None:
        if world()[0] == 0:
            with open(self.cfg.folder / "log.jsonl", "a") as f:
                f.write(json.dumps(dict(iteration=self.iteration) | log) + "\n")

    def save(self) -> None:
        if world()[0] == 0:
            save_atomic(self.state(), self.cfg.folder / "last.pt")

    def train_iteration(self) -> dict:
        """Grow, reward, back up, update: one line of the log."""
        cfg, clock = self.cfg, [time.perf_counter()]
        slots, prompts = draw_prompts(cfg, self.prompts, self.iteration)
        seen = self.policy.evaluations
        tree, images, rewards = together(self.grow, self.iteration, slots, prompts)
        clock.append(time.perf_counter())
        sampled = self.policy.evaluations - seen
        groups = tree.root if cfg.group == "root" else tree.prompt
        leaf_adv = leaf_advantages(rewards, groups, self.weights)
        adv = edge_advantages(tree, rewards, cfg, self.weights)
        for group in self.optimizer.param_groups:
            group["lr"] = cfg.lr * {"constant": 1.0, "linear": 1 - self.iteration / cfg.iterations,
                                    "cosine": 0.5 + 0.5 * math.cos(math.pi * self.iteration / cfg.iterations)
                                    }[cfg.lr_schedule]
        epochs = update(self.policy, tree, adv, leaf_adv, self.policy.encode(prompts), cfg,
                        self.optimizer, self.scaler)
        for e, p in zip(self.ema or [], self.policy.trainable):
            e.lerp_(p.data, 1 - cfg.ema)
        clock.append(time.perf_counter())
        spread = group_stats(rewards[0], groups)[1]
        log = dict(reward=(torch.tensor(self.weights) @ rewards).mean().item(), window=tree.levels[0].step.i,
                   zero_std_frac=(spread < MIN_SPREAD).float().mean().item(), reward_std=spread.mean().item(),
                   lr=self.optimizer.param_groups[0]["lr"], seconds_sample=clock[1] - clock[0],
                   seconds_update=clock[2] - clock[1], evaluations_sample=sampled,
                   evaluations_train=self.policy.evaluations - seen - sampled,
                   rho_start=epochs[0]["ratio_max"])
        for n, e in enumerate(epochs):
            log |= {f"{k}/{n}": v for k, v in e.items()}
        return log


def open_folder(cfg: Config):
    """Create and lock the run folder; the lock ends with the process, however it ends."""
    folder = cfg.folder
    if not cfg.resume and not cfg.overwrite and (folder / "config.json").exists():
        raise UsageError(f"{folder} holds a run: continue it with --resume {folder}, "
                         "replace it with --overwrite, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{folder} is in use by another run") from None
    except OSError as e:
        raise UsageError(f"--out {folder}: {e}") from None
    return lock


def cut_log(path: Path, iteration: int) -> None:
    """Drop what the log says of iterations after the checkpoint; they are run again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    keep = [line for line in lines if line.endswith("}\n") and json.loads(line)["iteration"] <= iteration]
    path.write_text("".join(keep))


def train(cfg: Config) -> Run:
    """Train from `cfg`, or continue `cfg.resume`; all it writes lies in `cfg.folder`."""
    leader = world()[0] == 0
    lock = open_folder(cfg) if leader else None
    run = Run(cfg)
    if cfg.resume:
        try:
            run.load(torch.load(cfg.folder / "last.pt", map_location="cpu", weights_only=True))
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as e:
            raise UsageError(f"--resume {cfg.folder}: last.pt is no checkpoint of this run "
                             f"({type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'empty'})") from None
    if leader:
        print(plan(cfg, math.prod(run.policy.shape)), flush=True)
        text = json.dumps(dataclasses.asdict(cfg) | dict(resume="", overwrite=False), indent=1)
        (cfg.folder / "config.json").write_text(text + "\n")
        cut_log(cfg.folder / "log.jsonl", (run.iteration or -1) if cfg.resume else -1)
    stop = []
    handlers = {s: signal.signal(s, lambda *_: stop.append(1) if not stop else os._exit(130))
                for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        loop(run, stop)
    except (RewardError, NumericalError):
        run.save()
        raise
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)
    if leader and not stop:
        import evaluate

        evaluate.draw_run(run)
    del lock
    return run


def loop(run: Run, stop: list) -> None:
    """Iterate until the end or a signal; a second signal ends the process at once."""
    from tqdm import tqdm

    cfg, leader, failed = run.cfg, world()[0] == 0, 0
    if run.iteration == 0:
        run.write(run.measure())
    bar = tqdm(total=cfg.iterations, initial=run.iteration, disable=not leader, unit="it")
    while run.iteration < cfg.iterations and not all_sum(torch.tensor(len(stop))):
        try:
            log, failed = run.train_iteration(), 0
        except NumericalError as e:
            log, failed = dict(skipped=f"{e} (iteration {run.iteration}, seed {cfg.seed})"), failed + 1
            bar.write(f"update skipped: {log['skipped']}", file=sys.stderr)
        run.iteration += 1
        last = run.iteration == cfg.iterations or failed == 3
        if not failed and (last or run.iteration % cfg.eval_every == 0):
            log |= run.measure()
        run.write(log)
        if last or run.iteration % cfg.save_every == 0:
            run.save()
        if failed == 3:
            raise NumericalError(f"3 iterations in a row failed, the last: {log['skipped']}; state saved")
        bar.set_postfix_str(" ".join(f"{n} {log[k]:.3g}" for n, k in BAR.items() if k in log))
        bar.update()
    bar.close()
    run.save()


BAR = {"reward": "reward", "eval": "eval", "|rho-1|": "rho_start", "clipped": "clip_high/0"}


# ======================================================================================
# 11. Command line
# ======================================================================================
class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def parse(argv: list[str] | None) -> Config:
    """Flags -> Config. Precedence: flag, else the run being resumed, else model, preset, default."""
    parser = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    for f in dataclasses.fields(Config):
        many, name = isinstance(f.default, tuple), "--" + f.name.replace("_", "-")
        if isinstance(f.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, help=f.metadata["help"].replace("%", "%%"))
        else:
            shown = " ".join(map(str, f.default)) if many else f.default
            parser.add_argument(name, type=type(f.default[0] if many else f.default), metavar="X",
                                nargs="+" if many else None, help=f"{f.metadata['help']} [{shown}]")
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as e:
        raise UsageError(str(e)) from None
    if unknown:
        raise UsageError(f"unknown flag {unknown[0]}{nearest(unknown[0], parser._option_string_actions)}")
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(given).items()}
    cfg = resume_config(given) if "resume" in given else resolve(given)
    check_config(cfg)
    return cfg


def resolve(given: dict) -> Config:
    """Fill in what the flags leave open: from the preset, then from the model."""
    method, model = given.get("method", Config.method), given.get("model", Config.model)
    if method not in PRESETS:
        raise UsageError(f"--method {method}: allowed are {', '.join(PRESETS)}{nearest(method, PRESETS)}")
    cfg = Config(**{**PRESETS[method], **FAMILIES[family(model)][1], **given})
    if is_ddim(model) and "noise_level" not in given:  # DDIM allows at most 1, also where it grows
        cfg = dataclasses.replace(cfg, noise_level=cfg.noise_level / (1 + max(cfg.noise_growth, 0)))
    return cfg


MAY_CHANGE = {"resume", "iterations", "device", "micro_batch", "eval_every", "save_every", "track", "plan"}


def resume_config(given: dict) -> Config:
    """The configuration of a run folder, with the few flags that may differ when it goes on."""
    folder = Path(given["resume"])
    try:
        old = json.loads((folder / "config.json").read_text())
        old = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in old.items()})
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise UsageError(f"--resume {folder}: no configuration of a run there ({e})") from None
    for k in given.keys() - MAY_CHANGE:
        if given[k] != getattr(old, k):
            raise UsageError(f"--{k.replace('_', '-')} {given[k]}: a resumed run keeps its {getattr(old, k)}; "
                             f"it may change {', '.join(sorted(MAY_CHANGE))}")
    return dataclasses.replace(old, out=str(folder), **{k: given[k] for k in given.keys() & MAY_CHANGE})


def main(argv: list[str] | None = None) -> int:
    try:
        cfg = parse(argv)
        if cfg.plan:
            print(plan(cfg))
        else:
            train(cfg)
        return 0
    except UsageError as e:
        print(f"treegrpo: {e}", file=sys.stderr)
        return 2
    except (RewardError, NumericalError) as e:
        print(f"treegrpo: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
