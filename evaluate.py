"""Looking at results."""

from __future__ import annotations

import dataclasses
import math

import torch

import treegrpo as T


def plan(cfg, dims: int | None = None) -> str:
    """What an iteration does and costs, beside flat GRPO with as many leaves."""
    starts = [cfg.window_start] if cfg.window_mode == "fixed" else range(cfg.steps - cfg.window)
    steps = [T.schedule(dataclasses.replace(cfg, window_mode="fixed", window_start=i), 0)
             for i in starts]
    sample = " ".join(str(T.nfe(s, cfg.roots)[0]) for s in steps)
    train = T.nfe(steps[0], cfg.roots, cfg.inner_epochs, cfg.kl > 0)[1]
    leaves = cfg.roots * math.prod(s.children for s in steps[0])
    text = (f"{cfg.method} on {cfg.model}: {cfg.steps} steps, {cfg.window_mode} window of "
            f"{cfg.window}, k {'-'.join(map(str, cfg.branch))}, roots {cfg.roots}, "
            f"{cfg.prompts_per_iteration} prompts per iteration\n"
            f"  per prompt: {leaves} leaves, {T.nfe(steps[0], cfg.roots)[1]} trained nodes\n"
            f"  denoiser evaluations{' (x 2 for guidance)' if cfg.guidance > 1 else ''}: "
            f"{sample} to sample (by window start), {train} to train\n"
            f"  flat GRPO with {leaves} leaves: {leaves * cfg.steps} to sample, "
            f"{leaves * (cfg.steps - 1)} to train")
    if dims:
        lo, hi = (cfg.clip_min, cfg.clip_max) if cfg.clip_max else (cfg.clip, cfg.clip)
        text += (f"\n  the ratio is clipped at 1 +- {lo / dims**0.5:.2e}"
                 + (f" to {hi / dims**0.5:.2e}" if hi > lo else "") + f" (D = {dims:,})")
    return text


def diversity(images, groups) -> float:
    """Root mean squared pixel difference between two images of a group, mean over groups."""
    pairs = [2 * images[groups == g].flatten(1).var(0).mean() for g in groups.unique()]
    return torch.stack(pairs).sqrt().mean().item()


def rollout_log(tree, images, rewards, weights, names) -> dict:
    """Statistics of a training rollout; rewards (R, L)."""
    total = weights @ rewards
    spread = T.group_stats(total, tree.prompt)[1]
    log = {"reward": total.mean().item(), "reward_std": spread.mean().item(),
           "zero_std_frac": (spread < T.MIN_SPREAD).float().mean().item(),
           "saturation": ((images <= 0) | (images >= 1)).float().mean().item(),
           "diversity": diversity(images, tree.prompt.to(images.device))}
    for n, (level, values) in enumerate(zip(tree.levels, T.backup(tree, total), strict=True)):
        _, std, k = T.group_stats(values, level.parent)
        if (k > 1).any():
            log[f"sibling_std/{n}"] = std[k > 1].mean().item()
    if len(names) > 1:
        log |= {f"reward/{name}": r.mean().item() for name, r in zip(names, rewards, strict=True)}
    return log


def draw_run(run) -> None:
    pass
