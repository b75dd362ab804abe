#!/usr/bin/env python
"""Look at runs of treegrpo.py, compare methods at equal cost, find silent faults.

    python evaluate.py draw RUN                    # curve.png, grid.png, tree.png: as in training
    python evaluate.py sample RUN "a red circle"   # images from the best weights
    python evaluate.py score RUN [RUN ...]         # paired comparison of runs with their base model
    python evaluate.py compare --methods treegrpo dancegrpo   # trained at equal denoiser cost
    python evaluate.py check --model sd15          # faults of a model and a method, in a minute
    python evaluate.py why                         # noise and bias of the policy gradient

Images come from the deterministic (ODE) sampler, trees from the rollout that trains. `score` gives
the base and every run the same prompts and noise, so that differences are paired; it keeps images
as 8-bit PNGs, a strip per prompt, in RUN/eval-HASH (of the base in base-HASH beside the runs) and
reads them again next time. HASH covers model, weights, sampler, seed and images per prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import hashlib
import html
import importlib
import io
import itertools
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import treegrpo as T

# ==== 1. What treegrpo.py says of a run =========================================================
def schedules(cfg) -> dict:
    """Schedule by the step where the window may start."""
    starts = [cfg.window_start] if cfg.window_mode == "fixed" else range(cfg.steps - cfg.window)
    return {i: T.schedule(dataclasses.replace(cfg, window_mode="fixed", window_start=i), 0)
            for i in starts}

def plan(cfg, dims: int | None = None) -> str:
    """What an iteration does and costs, beside flat GRPO with as many leaves."""
    steps = list(schedules(cfg).values())
    sample = " ".join(str(T.nfe(s, cfg.roots)[0]) for s in steps)
    train = T.nfe(steps[0], cfg.roots, cfg.inner_epochs, cfg.kl, cfg.anchor)[1]
    leaves = cfg.roots * math.prod(s.children for s in steps[0])
    doubled = cfg.guidance > 1 and T.family(cfg.model) != "flux"  # FLUX: guidance is an input
    double = " (x 2 for guidance)" if doubled else ""
    text = (f"{cfg.method} on {cfg.model}: {cfg.steps} steps, {cfg.window_mode} window of "
            f"{cfg.window}, k {'-'.join(map(str, cfg.branch))}, roots {cfg.roots}, "
            f"{cfg.prompts_per_iteration} prompts per iteration\n"
            f"  per prompt: {leaves} leaves, {T.nfe(steps[0], cfg.roots)[1]} trained nodes\n"
            f"  denoiser evaluations{double}: "
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

# ==== 2. Files and figures ======================================================================
def save_png(image: Tensor, path: Path) -> None:
    """Write (3, H, W) in [0, 1]; the file is complete or absent."""
    from PIL import Image
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    Image.fromarray((image * 255).round().byte().permute(1, 2, 0).cpu().numpy()).save(part, "png")
    os.replace(part, path)

def table(head, rows) -> list[str]:
    """Lines of a Markdown table."""
    rows = [map(str, r) for r in (head, ["---"] * len(head), *rows)]
    return [f"| {' | '.join(r)} |" for r in rows]

def number(x: float) -> str:
    if not math.isfinite(x):
        return "–"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"

@contextlib.contextmanager
def figure(path: Path, size, rows: int = 1, cols: int = 1, dpi: int = 110, **how):
    """Context with a figure and its axes (rows, cols), which ends by writing it."""
    from matplotlib.figure import Figure
    fig = Figure(size, layout="constrained")
    axes = fig.subplots(rows, cols, squeeze=False, **how)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    yield fig, axes
    fig.savefig(path, dpi=dpi)

def draw_all(folder: Path, **pictures) -> None:
    """Write NAME.png for each NAME=function(path), where matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return print("no pictures: matplotlib is not installed (pip install matplotlib)")
    for name, draw in pictures.items():
        draw(folder / f"{name}.png")
    print(f"pictures: {folder}/ {' '.join(f'{name}.png' for name in pictures)}")

def publish(folder: Path, name: str, lines: list[str], data, **pictures) -> None:
    """Print lines of Markdown; write NAME.md, NAME.json (null: not finite) and pictures."""
    text = "\n".join(lines) + "\n"
    plain = json.loads(json.dumps(data), parse_constant=lambda _: None)
    print("\n" + text)
    T.save_atomic(text, folder / f"{name}.md")
    T.save_atomic(json.dumps(plain, indent=1) + "\n", folder / f"{name}.json")
    print(f"written: {folder}/ {name}.md {name}.json")
    draw_all(folder, **pictures)

# ==== 3. Runs ===================================================================================
def load_run(folder, weights: str = "best", rewards: bool = False) -> T.Run:
    """A run with its best, last or base weights; with its prompts and rewards only on request."""
    cfg = run_config(folder)
    run = T.Run(cfg if rewards else dataclasses.replace(cfg, reward=(), prompts=""))
    if weights == "last":
        run.load(cfg.folder / "last.pt")
        return run
    run.ema = []  # best weights are averages already
    if weights == "best":
        with T.explained(f"{folder}: no best weights there", Exception):
            run.policy.restore(cfg.folder / "best")
    return run

def run_config(folder) -> T.Config:
    return dataclasses.replace(T.read_config(Path(folder)), out=str(folder), device="auto")

def is_tiny(cfg: T.Config) -> bool:
    return T.family(cfg.model) not in T.REPOSITORIES

def check_prompts(cfg: T.Config, prompts: list[str]) -> None:
    """Refuse what the tiny world cannot draw."""
    for p in prompts if is_tiny(cfg) else []:
        T.require(p in T.CAPTIONS, f"prompt {p!r}: {cfg.model} knows only a {'|'.join(T.COLOURS)} "
                  f"{'|'.join(T.SHAPES)}{T.nearest(p, T.CAPTIONS)}")

def images_of(run: T.Run, prompt: str, seed: int, n: int) -> Tensor:
    """Images of a prompt by the evaluated weights; they depend on nothing else -> (n, 3, H, W)."""
    with run.averaged():
        images = run.sample([prompt] * n, ("score", seed, prompt), list(range(n)))
    T.check_images(images, [prompt] * n)
    return images

def draw_command(args) -> None:
    """curve.png, grid.png and tree.png of a run, as after training"""
    run = load_run(args.run, "last", rewards=True)
    run.iteration = run.iteration if args.iteration is None else args.iteration
    draw_run(run)

def sample_command(args) -> None:
    """images of a trained run, a row per prompt: the first ones that `score` sees"""
    check_prompts(run_config(args.run), args.texts)
    run, n = load_run(args.run, args.weights), args.n or 8
    images = torch.stack([images_of(run, p, args.seed, n) for p in args.texts])
    zoom = max(1, 128 // images.shape[-1])
    images = images.repeat_interleave(zoom, 3).repeat_interleave(zoom, 4)
    path = Path(args.out or Path(args.run) / "sample.png")
    save_png(tiles(images, 4), path)
    print(path)

# ==== 4. Pictures ===============================================================================
MAX_LEAVES, MAX_CHAINS = 81, 12  # most leaves drawn of a tree, and of unbranched chains
THUMBNAIL = 128  # pixels; larger images are reduced before they are drawn

def thumbnails(images: Tensor) -> Tensor:
    """Images (N, 3, H, W) on the CPU, small enough for a figure."""
    large = images.shape[-1] > THUMBNAIL
    return (F.interpolate(images, (THUMBNAIL, THUMBNAIL), mode="area") if large else images).cpu()

def tiles(images: Tensor, gap: int) -> Tensor:
    """Images (R, C, 3, H, W) -> one (3, R (H + gap), C (W + gap)), white between them."""
    padded = F.pad(images, (0, gap, 0, gap), value=1.0)
    return torch.cat([torch.cat(list(row), 2) for row in padded], 1)

def draw_run(run) -> None:
    """Write curve.png, grid.png and tree.png into the run's folder."""
    pictures = {"curve": draw_curve, "grid": draw_before_after, "tree": draw_tree}
    draw_all(run.cfg.folder, **{k: functools.partial(f, run) for k, f in pictures.items()})

def draw_curve(run, path: Path) -> None:
    """Training reward and ODE evaluation over iterations, from log.jsonl."""
    cfg = run.cfg
    log = [json.loads(line) for line in (cfg.folder / "log.jsonl").read_text().splitlines()]
    reward = {r["iteration"]: r["reward"] for r in log if "reward" in r}
    values = {r["iteration"]: r["eval"] for r in log if "eval" in r}
    y, best = list(reward.values()), max(values, key=values.get, default=0)
    base, top = values.get(0, math.nan), values.get(best, math.nan)
    smooth = [statistics.mean(y[max(0, n - 4):n + 5]) for n in range(len(y))]
    with figure(path, (8, 5)) as (fig, [[ax]]):
        ax.plot(list(reward), y, "C1.", alpha=0.35, label="training reward (rollout)")
        ax.plot(list(reward), smooth, "C1", label="the same, mean of 9 iterations")
        ax.plot(list(values), list(values.values()), "C0o-", ms=4,
                label="evaluation (ODE, fixed prompts and noise)")
        ax.axhline(base, color="grey", ls="--", lw=1, label=f"base model: {base:.3f}")
        ax.plot(best, top, "C0*", ms=16, mec="white",
                label=f"best: {top:.3f} ({top - base:+.3f}) at iteration {best}")
        ax.set(xlabel="iteration", ylabel=f"reward: {' + '.join(cfg.reward)}",
               title=f"{cfg.method} on {cfg.model}")
        ax.grid(alpha=0.25)
        fig.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)

def draw_blocks(title: str, captions: list[str], blocks: dict[str, Tensor], path: Path) -> None:
    """Named blocks of images (R, C, 3, H, W) side by side, a row per caption."""
    rows, cols, _, side, _ = next(iter(blocks.values())).shape
    gap, size = max(1, side // 12), (2 + 0.75 * cols * len(blocks), 1 + 0.75 * rows)
    with figure(path, size, 1, len(blocks)) as (fig, [axes]):
        fig.suptitle(title, fontsize=11)
        for ax, (name, images) in zip(axes, blocks.items(), strict=True):
            ax.imshow(tiles(images, gap).permute(1, 2, 0).numpy(), interpolation="nearest")
            ax.set_title(name, fontsize=10)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        middle = [r * (side + gap) + side / 2 for r in range(rows)]
        axes[0].set_yticks(middle, [textwrap.shorten(c, 28, placeholder="…") for c in captions])
        axes[0].tick_params(length=0)

def draw_before_after(run, path: Path) -> None:
    """The base model and the trained one from the same noise."""
    cols, count = 6 if is_tiny(run.cfg) else 3, min(8, len(run.prompts))
    numbers = sorted(T.stream("grid").sample(range(len(run.prompts)), count))
    chosen = [run.prompts[n] for n in numbers]
    prompts, blocks = [p for p in chosen for _ in range(cols)], {}
    for name, weights in (("before", run.policy.reference()),
                          (f"after {run.iteration} iterations", run.averaged())):
        with weights:
            images = run.sample(prompts, ("grid",), list(range(len(prompts))))
        mean = (run.weights @ T.score(run.rewards, images, prompts)).mean()
        blocks[f"{name}: mean reward {mean:.2f}"] = thumbnails(images).unflatten(0, (count, cols))
    title = f"{run.cfg.method} on {run.cfg.model}: eval (ODE), same noise left and right"
    draw_blocks(title, chosen, blocks, path)

def siblings(level) -> int:
    """Most children that a node of the level has."""
    return int(level.parent.bincount().max())

def tree_rows(tree) -> list[dict[int, float]]:
    """Horizontal places {node: x} per level, leaves last; no edges cross. Large trees are cut."""
    branching = any(siblings(level) > 1 for level in tree.levels)
    order = sorted(range(len(tree.leaves)), key=lambda n: (int(tree.root[n]), *tree.path(n)))
    order = order[:MAX_LEAVES if branching else MAX_CHAINS]
    parent, x, rows = tree.levels[-1].parent, 0.0, [{}]
    for before, leaf in zip(order[:1] + order, order, strict=False):
        x += 1.5 if branching and parent[before] != parent[leaf] else 1.0
        rows[0][leaf] = x
    for level in reversed(tree.levels):
        above = {}
        for edge, x in rows[0].items():
            above.setdefault(int(level.parent[edge]), []).append(x)
        rows.insert(0, {n: statistics.mean(xs) for n, xs in above.items()})
    return rows

def tree_boxes(tree) -> list[dict[int, tuple[float, float, float]]]:
    """Centre and half side {node: (x, y, half)} of pictures, per row; unit: a leaf's width."""
    rows, boxes, y, above = tree_rows(tree), [], 0.0, 0.0
    width = max(rows[-1].values())
    for level, row in zip([None, *tree.levels], rows, strict=True):
        gap = min((b - a for a, b in itertools.pairwise(sorted(row.values()))), default=math.inf)
        half = min(0.46 * gap, max(0.6, 0.036 * width))
        space = max(1.0, 0.055 * width) if level and siblings(level) > 1 else 0.5
        y -= above + space + half if level else 0.0
        boxes.append({n: (x, y, half) for n, x in row.items()})
        above = half
    return boxes

def draw_tree(run, path: Path) -> None:
    """The tree that the next iteration would train, its edges coloured by advantage."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import CenteredNorm
    slots, prompts = T.draw_prompts(run.cfg, run.prompts, run.iteration)
    tree, images, rewards = run.grow(run.iteration, slots[:1], prompts[:1])
    adv, boxes = T.edge_advantages(tree, rewards, run.cfg, run.weights), tree_boxes(tree)
    (right, foot, half), top = list(boxes[-1].values())[-1], next(iter(boxes[0].values()))[2]
    unit = min(max(0.4, 6 / right), 30 / right)  # inches
    left, width, height = 0.3 - 1.35 / unit, right + 1, 3.4 * top - foot + half + 1.2
    largest = max(a.abs().max().item() for a in adv) or 1.0
    colours = ScalarMappable(CenteredNorm(0, largest), "coolwarm_r")
    size = unit * (width - left) + 1.2, unit * height + 0.7
    with figure(path, size, dpi=150) as (fig, [[ax]]):
        for d, row in enumerate(boxes):
            paint_row(ax, row, row_pictures(run, tree, images, d, list(row)),
                      (tree.levels[d - 1], adv[d - 1], boxes[d - 1]) if d else None, colours)
        paint_prefix(ax, run, tree, slots[0], boxes[0])
        label_rows(ax, tree, run.weights @ rewards, boxes, left)
        ax.set(xlim=(left, width), ylim=(3.4 * top - height, 3.4 * top), aspect="equal")
        ax.axis("off")
        bar = fig.colorbar(colours, ax=ax, shrink=0.7, aspect=30, pad=0.01)
        bar.set_label("advantage of an edge\n(blue: made likelier)")
        first, last, count = tree.levels[0].step, tree.levels[-1].step, len(tree.leaves)
        leaves = f"first {len(boxes[-1])} of {count}" if len(boxes[-1]) < count else count
        prompt = textwrap.shorten(prompts[0], 90, placeholder="…")
        fig.suptitle(f"“{prompt}”: rollout of {run.cfg.method} on {run.cfg.model}, iteration "
                     f"{run.iteration}\nwindow: steps {first.i + 1}–{last.j} of {run.cfg.steps}; "
                     f"{leaves} leaves; reward: {' + '.join(run.cfg.reward)}", fontsize=12)

def row_pictures(run, tree, images: Tensor, d: int, nodes: list[int]) -> Tensor:
    """Predicted clean images at the nodes of level d; after the last level the final images."""
    if d == len(tree.levels):
        return thumbnails(images[nodes])
    level = tree.levels[d]
    return thumbnails(run.decode(run.policy.denoised(level.x[nodes], level.pred[nodes],
                                                     level.step.i)))

def framed(ax, picture: Tensor, x: float, y: float, half: float, colour) -> None:
    from matplotlib.patches import Rectangle
    box = (x - half, x + half, y - half, y + half)
    ax.imshow(picture.permute(1, 2, 0).numpy(), extent=box, interpolation="nearest", zorder=2)
    ax.add_patch(Rectangle(box[::2], 2 * half, 2 * half, fill=False, ec=colour, lw=2, zorder=3))

def paint_row(ax, row, pictures, above, colours) -> None:
    """A row's pictures, and the edges to them from the row above: (level, advantages, boxes)."""
    for (n, (x, y, half)), picture in zip(row.items(), pictures, strict=True):
        if not above:
            framed(ax, picture, x, y, half, "black")
            continue
        level, adv, boxes = above
        a, (x0, y0, half0) = adv[n].item(), boxes[int(level.parent[n])]
        colour, y0, y1 = colours.to_rgba(a), y0 - half0, y + half
        framed(ax, picture, x, y, half, colour)
        ax.plot([x0, x], [y0, y1], color=colour, lw=1.2 + 3 * abs(a) / colours.norm.vmax, zorder=1)
        if len(row) <= MAX_CHAINS and siblings(level) > 1:
            ax.text((x0 + x) / 2, (y0 + y1) / 2, f"{a:+.2f}", fontsize=8, ha="center", va="center",
                    bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"}, zorder=4)

def paint_prefix(ax, run, tree, slot: int, row) -> None:
    """The initial noise above each root, and the ODE steps that all its descendants share."""
    steps, count = tree.levels[0].step.i, int(tree.root.max()) + 1
    draw = T.tree_noise((run.cfg.seed, run.iteration), [slot], run.policy.shape)
    noise = thumbnails(run.decode(draw(0, torch.zeros(count, dtype=torch.long))))
    for root, (x, _, half) in row.items():
        ax.plot([x, x], [half, 2 * half], color="black", lw=1.5, zorder=1)
        framed(ax, noise[root], x, 2.6 * half, 0.6 * half, "black")
    text = f"{steps} ODE step{'s' * (steps > 1)}, shared" if steps else ""
    ax.text(x + 0.2, 1.5 * half, text, fontsize=9, va="center")

def label_rows(ax, tree, total: Tensor, boxes, left: float) -> None:
    """At the left what each row shows; rewards below the leaves, the best in bold."""
    at = {"x": left, "fontsize": 9, "va": "center"}
    ys, halves = zip(*[next(iter(row.values()))[1:] for row in boxes], strict=True)
    ax.text(y=2.6 * halves[0], s="initial noise", **at)
    for d, level in enumerate(tree.levels):
        k, step = siblings(level), level.step.i
        if k > 1:
            ax.text(y=(ys[d] - halves[d] + ys[d + 1] + halves[d + 1]) / 2, color="grey",
                    s=f"SDE step {step + 1}:\n{k} children each", **at)
        if d == 0 or k > 1 or len(tree.levels) < 5:
            ax.text(y=ys[d], s="predicted image" + f"\nafter step {step}" * (step > 0), **at)
    ax.text(y=ys[-1], s="final images", **at)
    foot = ys[-1] - halves[-1] - 0.2
    ax.text(left, foot, "reward", fontsize=9, va="top")
    for leaf, (x, _, _) in boxes[-1].items():
        ax.text(x, foot, f"{total[leaf]:.2f}", fontsize=9, ha="center", va="top",
                rotation=90 * (len(boxes[-1]) > 40),
                weight="bold" if total[leaf] == total.max() else "normal")

# ==== 5. Scorers: rewards of `treegrpo.py --reward` and metrics of `score` ======================
CLIP_L, CLIP_H = "openai/clip-vit-large-patch14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
HUB = {  # hub repository, file, size, repository of the tokenizer
    "hpsv2": ("xswu/HPSv2", "HPS_v2.1_compressed.pt", "2 GB", CLIP_L),
    "clip": (CLIP_L, "config.json, model.safetensors", "1.7 GB", CLIP_L),
    "aesthetic": ("trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth", "4 MB", CLIP_L),
    "pickscore": ("yuvalkirstain/PickScore_v1", "config.json, model.safetensors", "4 GB", CLIP_H),
}
VIT_H = dict(projection_dim=1024,  # architecture of HPS v2.1
             text_config=dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                              num_attention_heads=16, hidden_act="gelu", eos_token_id=49407),
             vision_config=dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32,
                                num_attention_heads=16, hidden_act="gelu", patch_size=14))
OPEN_CLIP = """visual.transformer.resblocks vision_model.encoder.layers  .ln_ .layer_norm
    transformer.resblocks text_model.encoder.layers  .c_fc .fc1  .c_proj .fc2  .attn .self_attn
    visual.layer_normpre vision_model.pre_layrnorm  visual.conv1 visual.patch_embedding
    visual.layer_normpost vision_model.post_layernorm  visual.proj visual_projection.weight
    visual.positional_embedding visual.position_embedding.weight  visual. vision_model.embeddings.
    positional_embedding text_model.embeddings.position_embedding.weight
    token_embedding text_model.embeddings.token_embedding  ln_final text_model.final_layer_norm
    text_projection text_projection.weight""".split()  # name there, name in transformers, in order
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

def from_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip weights -> transformers' CLIPModel: names, projections transposed, q k v apart."""
    out = {}
    for key, value in state.items():
        for old, new in zip(OPEN_CLIP[::2], OPEN_CLIP[1::2], strict=True):
            key = key.replace(old, new)
        value = value.T if key in ("text_projection.weight", "visual_projection.weight") else value
        if "in_proj_" in key:
            for n, part in zip("qkv", value.chunk(3), strict=True):
                out[key.replace("in_proj_", f"{n}_proj.")] = part
        else:
            out[key] = value
    return out

def load_clip(name: str, device, folder: Path | None):
    """Float32 CLIPModel and tokenizer of a reward, from the hub or a folder; errors if wrong."""
    from huggingface_hub import hf_hub_download
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, logging
    logging.set_verbosity_error()
    (repo, file, _, words), extra = HUB[name], {}
    if name == "hpsv2":
        file = folder / file if folder else hf_hub_download(repo, file)
        state = from_open_clip(torch.load(file, "cpu", weights_only=True)["state_dict"])
        extra = dict(config=CLIPConfig(**VIT_H), state_dict=state)
        with torch.device("meta"):
            need = {k: v.shape for k, v in CLIPModel(extra["config"]).state_dict().items()}
        if wrong := need.items() ^ {k: v.shape for k, v in state.items()}.items():
            raise ValueError(f"{file} is not HPS v2.1 by its {min(wrong)[0]}")
    model, info = CLIPModel.from_pretrained(None if extra else folder or repo, dtype=torch.float32,
                                            output_loading_info=True, **extra)
    if wrong := info["missing_keys"] | info["unexpected_keys"]:
        raise ValueError(f"{folder or repo} is not a CLIPModel by its {min(wrong)}")
    if folder and any((folder / f).exists() for f in ("vocab.json", "tokenizer.json")):
        words = folder
    tokenizer, need = CLIPTokenizer.from_pretrained(words), model.config.text_config.vocab_size
    if len(tokenizer) != need:  # where transformers finds none it answers with an empty one
        raise ValueError(f"the tokenizer of {words} has {len(tokenizer)} tokens, not {need}")
    return model.to(device).eval().requires_grad_(False), tokenizer

def clip_pixels(images: Tensor, side: int, longest: bool = False) -> Tensor:
    """Images (B, 3, H, W) in [0, 1] -> (B, 3, side, side): antialiased bicubic, normalised.

    longest: the longest side becomes `side`, zeros fill the rest, as in the hpsv2 package;
    else the shortest, then a centre crop, as in CLIP's image processor.
    """
    h, w = images.shape[-2:]
    h, w = (round(n * (side / max(h, w))) if longest else side * n // min(h, w) for n in (h, w))
    x = F.interpolate(images.float(), (h, w), mode="bicubic", antialias=True)
    top, left = int((side - h) / 2), int((side - w) / 2)  # negative: cropped
    x = F.pad(x if longest else x.clamp(0, 1), (left, side - w - left, top, side - h - top))
    mean, std = (x.new_tensor(c).view(3, 1, 1) for c in (CLIP_MEAN, CLIP_STD))
    return (x - mean) / std

def clip_reward(name: str, device, folder: Path | None):
    """Cosine of image and prompt in a CLIP, no logit scale: hpsv2, clip, pickscore.

    PickScore as published is 100 times this (flow_grpo: 100/26); advantages ignore the scale.
    """
    (model, tokenizer), hps, clean = load_clip(name, device, folder), name == "hpsv2", str
    side = model.config.vision_config.image_size
    if hps:
        from ftfy import fix_text  # the package cleans prompts before it splits them into tokens
        def clean(prompt: str) -> str:
            return html.unescape(html.unescape(fix_text(prompt))).lower()

    @functools.lru_cache(maxsize=4096)
    def text(prompt: str) -> Tensor:  # (D,); a prompt that is too long loses its end
        ids = tokenizer([clean(prompt)], padding="max_length", truncation=True, max_length=77,
                        split_special_tokens=True, return_tensors="pt").input_ids
        return F.normalize(model.get_text_features(ids.to(device)).pooler_output)[0]

    def score(images: Tensor, prompts: list[str]) -> Tensor:
        image = torch.cat([model.get_image_features(clip_pixels(x, side, hps)).pooler_output
                           for x in images.to(device).split(32)])
        return (F.normalize(image) * torch.stack([text(p) for p in prompts])).sum(1)
    return score

def jpeg_reward(sign: int, device, folder=None):
    """Sign times the size in kB as a JPEG of quality 95 (ddpo-pytorch)."""
    from PIL import Image
    def kilobytes(image: Tensor) -> float:  # (3, H, W)
        pixels = (image.float() * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG", quality=95)
        return file.tell() / 1000
    return lambda images, prompts: torch.tensor([sign * kilobytes(i) for i in images])

def aesthetic_metric(device, folder: Path | None = None):
    """LAION aesthetic predictor v2 (about 1 to 10): an MLP on CLIP ViT-L/14's unit features.

    Local copies: a folder with the MLP's file and, in it, `clip-vit-large-patch14`.
    """
    from huggingface_hub import hf_hub_download
    (repo, file, *_), widths = HUB["aesthetic"], (768, 1024, 128, 64, 16, 1)
    mlp = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    state = torch.load(folder / file if folder else hf_hub_download(repo, file), "cpu",
                       weights_only=True)  # layers 0, 2, 4, 6, 7: dropout between, no activation
    mlp.load_state_dict({f"{new}.{p}": state[f"layers.{old}.{p}"] for p in ("weight", "bias")
                         for new, old in enumerate((0, 2, 4, 6, 7))})
    mlp.to(device).requires_grad_(False)
    clip, _ = load_clip("clip", device, folder / "clip-vit-large-patch14" if folder else None)
    side = clip.config.vision_config.image_size

    def score(images: Tensor, prompts: list[str]) -> Tensor:
        x = torch.cat([clip.get_image_features(clip_pixels(x, side)).pooler_output
                       for x in images.to(device).split(32)])
        return mlp(F.normalize(x))[:, 0]
    return score

def imagereward_metric(device, folder: Path | None = None):
    """ImageReward v1.0 (arXiv 2304.05977), through its own package, one image at a time."""
    from PIL import Image
    with T.explained("needs the image-reward package, with OpenAI's clip and transformers 4, hence "
                     "an environment of its own", ImportError, error=ImportError):
        import ImageReward
    local = folder and {"name": str(folder / "ImageReward.pt"),
                        "med_config": str(folder / "med_config.json")}
    model = ImageReward.load(**(local or {}), device=str(device))

    def score(images: Tensor, prompts: list[str]) -> Tensor:
        pixels = (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        return torch.tensor([float(model.score(p, Image.fromarray(x)))
                             for p, x in zip(prompts, pixels, strict=True)])
    return score

def scorer(make, name: str, device, folder: Path | None = None, flag: str = "--reward"):
    """make(device, folder), with one line for whatever is missing or wrong; flag: who asked."""
    try:
        return make(device, folder)
    except T.UsageError:
        raise
    except Exception as e:
        what, place = " ".join(str(e).split()).partition(". ")[0], f" in {folder}" if folder else ""
        error = f"{flag} {name}{place}: {what} ({type(e).__name__})"
        if name in HUB:
            repo, file, size, words = HUB[name]
            error += (f". It needs {file} ({size}) of {repo} and the tokenizer (vocab.json, "
                      f"merges.txt) of {words}, from the hub or --reward-weights {name}=FOLDER")
        raise T.UsageError(error) from None

SCORERS = {"jpeg": functools.partial(jpeg_reward, -1),  # compressible
           "incompressible": functools.partial(jpeg_reward, 1),
           **{k: functools.partial(clip_reward, k) for k in ("hpsv2", "clip", "pickscore")},
           "aesthetic": aesthetic_metric, "imagereward": imagereward_metric}
SCORERS = {name: functools.partial(scorer, make, name) for name, make in SCORERS.items()}

PROMPTS = [  # for a first run of a real model: subjects, counts, colours, places, styles, lettering
    "a lighthouse on a cliff in a thunderstorm, oil painting", "a fox asleep in snow at sunrise",
    "three red apples beside a blue teapot", "an old fisherman mending a net, portrait photo",
    "a glass greenhouse full of ferns, morning mist", "a black bicycle leaning on a yellow wall",
    "two astronauts playing chess on the moon", "a bowl of ramen with a soft egg, seen from above",
    "a shop window with a sign that says OPEN", "a paper boat drifting down a flooded street",
    "a stone bridge over a mountain stream in autumn", "a marble statue of an owl in headphones",
    "a market square at night lit by lanterns, watercolour", "a green parrot on a stack of books",
    "an empty railway station in fog, black and white photo", "a castle made of ice at midnight"]

# ==== 6. Measures: fn(images (B, 3, H, W) in [0, 1], prompts) -> (B,), as rewards are ===========
INK = 0.55  # the tiny world's paper is 0.97 in every channel; each of its inks is below 0.27 in one
CLEAN = 0.1  # a background pixel is clean within this of the paper

def tiny_pixels(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images in the tiny world's 16 x 16 pixels, and where there is ink (B, 16, 16)."""
    images = F.interpolate(images, (16, 16), mode="area")
    return images, images.amin(1) < INK

def hue(rgb: Tensor) -> Tensor:
    """Angle around the grey axis, (..., 3) -> (...)."""
    r, g, b = rgb.unbind(-1)
    return torch.atan2(3**0.5 * (g - b), 2 * r - g - b)

def right_colour(images: Tensor, prompts: list[str]) -> Tensor:
    """1 where the hue of the mean ink is nearest to that of the caption's colour."""
    images, ink = tiny_pixels(images)
    mean = (images * ink[:, None]).sum((2, 3))  # the hue of a sum is that of the mean
    palette = hue(torch.tensor(list(T.COLOURS.values()), device=images.device))
    nearest = (hue(mean)[:, None] - palette).cos().argmax(1)
    want = torch.tensor([list(T.COLOURS).index(p.split()[1]) for p in prompts])
    return ((nearest == want.to(ink.device)) & ink.any((1, 2))).float()

def match(images: Tensor) -> tuple[Tensor, Tensor]:
    """Shape and place whose outline best correlates with the ink of any colour; -1: no ink."""
    def centred(images):
        ink = tiny_pixels(images)[1].flatten(1).float()
        return F.normalize(ink - ink.mean(1, keepdim=True))
    colour = next(iter(T.COLOURS))
    outlines = centred(torch.cat([T.draw_caption(f"a {colour} {s}") for s in T.SHAPES]))
    value, best = (centred(images) @ outlines.T.to(images.device)).max(1)
    return torch.where(value > 0, best // len(T.PLACES), -1), best % len(T.PLACES)

def right_shape(images: Tensor, prompts: list[str]) -> Tensor:
    """1 where the best matching outline is that of the caption's shape."""
    want = torch.tensor([T.SHAPES.index(p.split()[2]) for p in prompts])
    return (match(images)[0] == want.to(images.device)).float()

def clean_background(images: Tensor, prompts: list[str]) -> Tensor:
    """Share of the pixels that do not touch ink which have the paper's colour."""
    images, ink = tiny_pixels(images)
    far = F.max_pool2d(ink[:, None].float(), 3, 1, 1)[:, 0] == 0
    paper = ((images - 0.97).abs() < CLEAN).all(1)
    return (paper & far).sum((1, 2)) / far.sum((1, 2)).clamp(min=1)

def chroma(images: Tensor, prompts: list[str]) -> Tensor:
    """Largest minus smallest channel, mean over pixels."""
    return (images.amax(1) - images.amin(1)).mean((1, 2))

def sharpness(images: Tensor, prompts: list[str]) -> Tensor:
    """Mean absolute difference of vertical plus horizontal neighbours."""
    return images.diff(dim=2).abs().mean((1, 2, 3)) + images.diff(dim=3).abs().mean((1, 2, 3))

def prompt_diversity(images: Tensor) -> Tensor:
    """RMS difference between two images of a prompt, in the space of 32 x 32 RGB thumbnails."""
    small = F.interpolate(images, (32, 32), mode="area") if images.shape[-1] > 32 else images
    return torch.tensor(diversity(small, torch.zeros(len(images), dtype=torch.long)))

def spread(images: Tensor) -> Tensor:
    """Entropy of the places that a prompt's shapes are at, in units of its maximum."""
    shape, place = match(images)
    share = place[shape >= 0].bincount(minlength=len(T.PLACES)) / (shape >= 0).sum().clamp(min=1)
    return torch.special.entr(share).sum() / math.log(len(T.PLACES))

METRICS = {"colour": right_colour, "shape": right_shape, "clean": clean_background}  # tiny world
TINY_METRICS, REAL_METRICS = ["shapes", "colour", "shape", "clean"], ["hpsv2", "clip"]
DRIFT = {"chroma": chroma, "sharpness": sharpness}

def load_metric(name: str, device, folders: dict):
    known = T.reward_makers() | METRICS
    T.allow(":" in name or name in known, "metrics", name, [*known, "MODULE:FUNCTION"])
    how = {"flag": "--metrics"} if name in SCORERS else {}
    return (METRICS.get(name) or (known[name](device, folders.get(name), **how) if name in known
                                  else T.load_function("--metrics", name)))

# ==== 7. Health: what a run's numbers should be, for the loop, `check` and `score` ==============
FALL = 0.02  # relative; a metric that was not trained for and surely falls by more raises an alarm
HEALTH = {  # value of the log, or of `score` its change relative to the base: least, most, why
    "zero_std_frac": (0, 0.5, "prompts whose images all score alike teach nothing: raise "
                      "--noise-level or --branch, drop these prompts, or use a finer reward"),
    "reward_std": (1e-4, math.inf, "rewards of a prompt's images are nearly the same: raise "
                   "--noise-level or lower --window-ratio, or use a reward that tells them apart"),
    "diversity": (0.01, math.inf, "images of a prompt are nearly the same: raise --noise-level, "
                  "--roots or --depth, or lower --window-ratio for earlier windows"),
    "saturation": (0, 0.5, "half of the pixel values are at 0 or 1: the reward is being gamed; "
                   "raise --kl or stop earlier, and look at the images"),
    "ratio_max/0": (0, 2e-5, "the update does not see the model that sampled: look for dropout, "
                    "train mode, or another micro-batch or precision; run `evaluate.py check`"),
    "ratio_std": (0, 0.02, "the policy moves far within one rollout: lower --lr or --inner-epochs"),
    "clip": (0, 0.5, "share of edges that the clip stops in the last epoch: above half the update "
             "stands still; lower --lr or --inner-epochs"),
    "grad_norm": (1e-7, 10, "gradient norm before clipping: at 0 nothing is learnt (do rewards "
                  "differ?), if large lower --lr, --sft or --kl"),
    "kl": (0, 0.05, "far from the reference model: raise --kl, lower --lr, or stop earlier"),
    "change of chroma": (-0.25, 0.25, "preference models like strong colour and contrast"),
    "change of sharpness": (-0.25, 0.25, "texture, grids and noise raise it; blur lowers it"),
    "change of diversity": (-0.25, math.inf, "one image a prompt is an easy way to a high reward"),
    "change of spread": (-0.25, math.inf, "the same, seen in where shapes are"),
}

def vitals(log: dict) -> dict[str, float]:
    """What HEALTH has a range for in a line of the training log; the worst of the epochs."""
    last = max((int(k.split("/")[1]) for k in log if k.startswith("grad_norm/")), default=0)
    out = {k: log[k] for k in HEALTH if k in log}
    for name in ("grad_norm", "kl", "ratio_std"):
        values = [log[f"{name}/{n}"] for n in range(last + 1) if f"{name}/{n}" in log]
        out |= {name: max(values)} if values else {}
    if last:  # with one epoch per rollout the ratio is 1 and nothing can be clipped
        out["clip"] = log[f"clip_low/{last}"] + log[f"clip_high/{last}"]
    return out

def healthy(name: str, value: float) -> bool:
    return HEALTH[name][0] <= value <= HEALTH[name][1]

def warn(history: list[dict], patience: int = 10) -> list[str]:
    """Advice on what left its healthy range `patience` iterations ago, oldest log line first.

    A value that stays outside is named again after ten times as many iterations.
    """
    seen, out = [vitals(log) for log in reversed(history) if "reward" in log], []
    for name, (low, high, advice) in HEALTH.items():
        ill = list(itertools.takewhile(lambda v, n=name: n in v and not healthy(n, v[n]), seen))
        if len(ill) == patience or (ill and len(ill) % (10 * patience) == 0):
            out.append(f"{name} {ill[0][name]:.3g} is outside {low:g} to {high:g} for {len(ill)} "
                       f"iterations: {advice}")
    return out

def watch(history: list[dict], log: dict) -> None:
    """Add a line of the log to its history; print what `warn` makes of it above the bar."""
    from tqdm import tqdm
    history[:] = [*history[-100:], log]
    for advice in warn(history):
        tqdm.write(f"advice: {advice}", file=sys.stderr)

def health_text() -> str:
    rows = [f"{name}, {low:g} to {high:g}: {why}" for name, (low, high, why) in HEALTH.items()]
    return "\n".join(["healthy ranges of the log, and of changes in `score`:"] + [
        textwrap.fill(row, 100, initial_indent="  ", subsequent_indent="      ") for row in rows])

# ==== 8. score: paired comparison of runs with their base =======================================
RESAMPLES = 2000

def bootstrap(diff: Tensor) -> tuple[float, float]:
    """95 % interval of the mean of paired differences (P prompts, n images).

    In each resample prompts are drawn with replacement, then images within them.
    """
    (P, n), gen = diff.shape, torch.Generator().manual_seed(0)
    if P * n < 2:
        return math.nan, math.nan
    rows = torch.randint(P, (RESAMPLES, P, 1), generator=gen)
    means = diff[rows, torch.randint(n, (RESAMPLES, P, n), generator=gen)].mean((1, 2))
    return tuple(means.quantile(torch.tensor([0.025, 0.975])).tolist())

def compare_scores(base: Tensor, trained: Tensor) -> dict:
    """Means, paired difference with interval, share of images that got better (a tie is half)."""
    diff = trained - base
    wins = ((diff > 0).float() + 0.5 * (diff == 0)).mean()
    low, high = bootstrap(diff)
    return {"base": base.mean().item(), "trained": trained.mean().item(), "low": low, "high": high,
            "difference": diff.mean().item(), "win_rate": wins.item()}

def alarm(name: str, row: dict, rewards) -> str:
    """Why a measure looks as if the reward was gamed; empty if it does not."""
    change, drift = row["difference"] / row["base"] if row["base"] > 0 else 0.0, f"change of {name}"
    if drift in HEALTH:
        return "" if healthy(drift, change) else f"drift {change:+.0%}"
    falls = name not in rewards and row["high"] < 0 and change < -FALL
    return f"falls {change:+.0%}" if falls else ""

def image_folder(folder: Path, cfg: T.Config, weights: str, seed: int, n: int) -> Path:
    """Where images are kept, named by a hash of all they depend on but the prompt."""
    key = [cfg.model, cfg.dtype, cfg.steps, cfg.resolution, cfg.guidance, seed, n]
    key += [T.BASE, T.CAPTIONS, T.PLACES] * is_tiny(cfg)
    digest = hashlib.sha256(json.dumps(key).encode())
    if weights == "base":
        return folder.parent / f"base-{digest.hexdigest()[:12]}"
    files = (folder / "best").rglob("*") if weights == "best" else [folder / "last.pt"]
    for path in sorted(f for f in files if f.is_file()):
        digest.update(path.read_bytes())
    return folder / f"eval-{digest.hexdigest()[:12]}"

def generate(where: Path, folder: Path, weights: str, prompts, seed: int, n: int) -> dict:
    """{prompt: PNG with its n images side by side}; those that exist are kept."""
    from tqdm import tqdm
    wanted = {p: where / f"{hashlib.sha256(p.encode()).hexdigest()[:16]}.png" for p in prompts}
    missing, run = {p: path for p, path in wanted.items() if not path.exists()}, None
    for prompt, path in tqdm(missing.items(), f"{where}: images", disable=not missing):
        run = run or load_run(folder, weights)
        save_png(torch.cat(list(images_of(run, prompt, seed, n)), 2), path)
    return wanted

def read_images(path: Path, n: int) -> Tensor:
    """(n, 3, H, W) from what `generate` wrote."""
    import numpy as np
    from PIL import Image
    strip = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255
    return torch.stack(strip.chunk(n, 2))

def measure(paths: dict, n: int, metrics: dict, sets: dict, device) -> dict:
    """By name, metrics of all images (P, n) and set measures of all prompts (P, 1)."""
    from tqdm import tqdm
    values, where = {name: [] for name in metrics | sets}, next(iter(paths.values())).parent
    for prompt, path in tqdm(paths.items(), f"{where}: scores", unit="prompt"):
        images = read_images(path, n).to(device)
        for name, row in zip(metrics, T.score(metrics, images, [prompt] * n), strict=True):
            values[name].append(row)
        for name, function in sets.items():
            values[name].append(function(images).cpu()[None])
    return {name: torch.stack(rows) for name, rows in values.items()}

def hpdv2_prompts() -> list[str]:
    """The benchmark of HPDv2 (arXiv 2306.09341): 800 prompts in each of four styles."""
    try:
        from huggingface_hub import hf_hub_download
        files = [hf_hub_download("zhwang/HPDv2", f"benchmark/{style}.json", repo_type="dataset")
                 for style in ("anime", "concept-art", "paintings", "photo")]
        return [p for f in files for p in json.loads(Path(f).read_text("utf-8"))]
    except (ImportError, OSError, ValueError) as e:
        raise T.UsageError("--prompts hpdv2: the data set zhwang/HPDv2 cannot be fetched "
                           f"({type(e).__name__}); give a .txt or .jsonl file") from None

def score_prompts(source: str | None, configs: dict) -> list[str]:
    """Prompts to evaluate on, without repeats; says which of them were trained on."""
    prompts = T.CAPTIONS
    if source == "hpdv2" or not (source or all(map(is_tiny, configs.values()))):
        prompts = hpdv2_prompts()
    elif source:
        prompts = T.read_prompts(source)
    prompts = list(dict.fromkeys(prompts))
    for folder, cfg in configs.items():
        check_prompts(cfg, prompts)
        try:
            seen = set(prompts) & set(T.training_prompts(cfg))
            text = f"trained on {len(seen)} of these {len(prompts)} prompts"
        except T.UsageError as e:
            text = f"overlap with its training prompts is unknown ({e})"
        closed = "the tiny world's captions are a closed set; only the noise is new"
        print(f"{folder}: {closed if is_tiny(cfg) else text}")
    return prompts

def score_command(args) -> None:
    """paired differences of runs from their base, with intervals, win rates and alarms"""
    configs = {Path(f): run_config(f) for f in args.runs}
    tiny = all(map(is_tiny, configs.values()))
    device, n = T.pick_device("auto"), args.n or (16 if tiny else 4)
    rewards = {f: [T.parse_reward(r)[0] for r in cfg.reward] for f, cfg in configs.items()}
    names = args.metrics or sum(rewards.values(), []) + (TINY_METRICS if tiny else REAL_METRICS)
    local = T.local_weights(sum((list(c.reward_weights) for c in configs.values()),
                                list(args.reward_weights)))
    metrics = {name: load_metric(name, device, local) for name in names} | DRIFT
    sets = ({"diversity": prompt_diversity} if n > 1 else {}) | ({"spread": spread} if tiny else {})
    prompts, rows, by_prompt = score_prompts(args.prompts, configs), [], []
    values, pictures = {}, {}
    for folder, cfg in configs.items():
        where = {w: image_folder(folder, cfg, w, args.seed, n) for w in ("base", args.weights)}
        for weights, place in where.items():
            paths = generate(place, folder, weights, prompts, args.seed, n)
            if place not in values:
                values[place] = measure(paths, n, metrics, sets, device)
                name = f"base of {cfg.model}" if weights == "base" else str(folder)
                pictures[name] = torch.stack([thumbnails(read_images(paths[p], n)[:4])
                                              for p in prompts[:8]])
        for name, b in values[where["base"]].items():
            t = values[where[args.weights]][name]
            row = {"run": str(folder), "metric": name} | compare_scores(b, t)
            rows.append(row | {"alarm": alarm(name, row, rewards[folder])})
            means = zip(prompts, *(v.mean(1).tolist() for v in (b, t, t - b)), strict=True)
            by_prompt += [(folder, name, *line) for line in means]
    out, sheet = Path(args.out or Path(args.runs[0]) / "score"), io.StringIO()
    csv.writer(sheet).writerows([("run", "metric", "prompt", "base", "trained", "difference"),
                                 *by_prompt])
    T.save_atomic(sheet.getvalue(), out / "prompts.csv")
    setting = {"prompts": len(prompts), "images_per_prompt": n, "seed": args.seed,
               "weights": args.weights}
    publish(out, "summary", summary(setting, rows), setting | {"results": rows}, grid=functools
            .partial(draw_blocks, "eval (ODE): same noise in all blocks", prompts[:8], pictures))

def summary(setting: dict, rows: list[dict]) -> list[str]:
    """Markdown: a table per run and the meaning of the alarms."""
    lines = ["# {prompts} prompts x {images_per_prompt} images, seed {seed}, {weights} weights, "
             "ODE sampler, same noise for base and run".format(**setting)]
    head = ("metric", "base", "run", "difference", "95 % interval", "win rate", "alarm")
    for folder in dict.fromkeys(r["run"] for r in rows):
        lines += ["", f"## {folder}", "", *table(head, [
            (r["metric"], f"{r['base']:.3f}", f"{r['trained']:.3f}", f"{r['difference']:+.3f}",
             f"{r['low']:+.3f} to {r['high']:+.3f}",
             "" if f"change of {r['metric']}" in HEALTH else f"{r['win_rate']:.0%}", r["alarm"])
            for r in rows if r["run"] == folder])]
    ranges = [(name, f"{lo:+.0%} to {hi:+.0%}".replace("+inf%", "any"), why)
              for name, (lo, hi, why) in HEALTH.items() if name.startswith("change")]
    return [*lines, "", "Alarms: a metric that was not the reward surely falls by over "
            f"{FALL:.0%}, or", "", *table(("relative", "leaves", "because"), ranges)]

# ==== 9. compare: methods trained at equal denoiser cost ========================================
# Cost is in forward-equivalents: a latent through the denoiser is 1, its backward pass 2; under
# guidance the pair counts once. Evaluation is free, for all methods alike.
UNHASHED = ("out", "resume", "overwrite", "plan", "track", "eval_every", "save_every")

@dataclasses.dataclass(frozen=True)
class Job:
    """One training run of a comparison."""
    cfg: T.Config
    budget: int
    every: int

    @property
    def path(self) -> Path:
        """Where its result is kept, named by a hash of what it depends on."""
        config = {k: v for k, v in dataclasses.asdict(self.cfg).items() if k not in UNHASHED}
        text = json.dumps([config, self.budget, self.every])
        return Path(self.cfg.out) / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"

def iteration_cost(cfg: T.Config, iteration: int) -> int:
    return T.forward_equivalents(T.schedule(cfg, iteration), cfg) * cfg.prompts_per_iteration

def make_job(flags: list[str], seed: int, budget: int, every: int, out: Path) -> Job:
    """With the most iterations, at least one, that cost no more than the budget."""
    cfg = T.parse([*flags, "--seed", str(seed), "--out", str(out / "runs")])
    spent = itertools.accumulate(iteration_cost(cfg, n) for n in itertools.count())
    iterations = sum(1 for _ in itertools.takewhile(lambda cost: cost <= budget, spent))
    return Job(dataclasses.replace(cfg, iterations=max(1, iterations)), budget, every)

def settings(text: str) -> list[str]:
    """'flag=value,...' -> flags of treegrpo.py."""
    pairs = (part.partition("=") for part in text.split(",") if part)
    return [word for name, _, value in pairs
            for word in ("--" + name.strip().replace("_", "-"), *value.split())]

def variants(args) -> dict[str, list[str]]:
    """Rows of the comparison: label -> flags of treegrpo.py."""
    out = {m: ["--method", m] for m in args.methods}
    for text in args.set:
        label, method, more = [*text.split(":", 2), "", ""][:3]
        T.require(label and method, f"--set {text}: must be LABEL:METHOD[:flag=value,...]")
        out[label] = ["--method", method, *settings(more)]
    T.require(out, "--methods or --set: name what to compare")
    for label in args.baseline:
        T.allow(label in out, "baseline", label, out)
    return {label: [*args.flags, *flags] for label, flags in out.items()}

def observe(run: T.Run) -> dict:
    """Reward of the evaluation, and how much images of one prompt differ there."""
    out, some = {"reward": run.measure()["eval"]}, run.prompts[:16]
    n = min(run.cfg.eval_images // len(some), 8)
    if n < 2:
        return out
    with run.averaged():
        images = run.sample(some * n, ("evaluation",), list(range(n * len(some))))
    out["eval_diversity"] = diversity(images, torch.arange(len(images)) % len(some))
    if is_tiny(run.cfg):  # number of places that shapes take
        spreads = [spread(images[k::len(some)]).item() for k in range(len(some))]
        out["places"] = statistics.mean(len(T.PLACES) ** s for s in spreads)
    return out

def credit(run: T.Run, iterations: int = 4) -> dict:
    """Advantage at each trained step: mean |A| over some rollouts, and by leaf of the first."""
    size, example = {}, []
    for n in reversed(range(iterations)):
        tree, _, rewards = run.grow(n, [0], T.draw_prompts(run.cfg, run.prompts, n)[1][:1])
        adv = T.edge_advantages(tree, rewards, run.cfg, run.weights)
        adv = {m: (level.step.i, adv[m]) for m, level in enumerate(tree.levels) if level.step.train}
        for i, a in adv.values():
            size.setdefault(i, []).append(a.abs().mean().item())
        example = [{i: a[path[m]].item() for m, (i, a) in adv.items()}
                   for path in map(tree.path, range(len(tree.leaves)))]
    return {"size": {i: statistics.mean(v) for i, v in size.items()}, "example": example}

def run_job(job: Job) -> dict:
    """Train within the budget; what came of it is written to `job.path` at the end."""
    torch.set_num_threads(1)
    cfg = dataclasses.replace(job.cfg, out=str(job.path.with_suffix("")))
    run, spent, failed, next_at = T.Run(cfg), {"cost": 0, "cpu": 0.0, "wall": 0.0}, [], job.every
    out = {"config": dataclasses.asdict(job.cfg), "budget": job.budget, "every": job.every,
           "seconds": "wall" if run.device.type == "cuda" else "cpu",
           "points": [{"iteration": 0, **spent, **observe(run)}], "credit": credit(run)}
    while run.iteration < cfg.iterations and len(failed) < 3:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            log, failed = run.train_iteration(), []
        except T.NumericalError as e:
            log, failed = {}, [*failed, f"{e} (iteration {run.iteration})"]
        spent = {"cost": spent["cost"] + iteration_cost(cfg, run.iteration),
                 "cpu": spent["cpu"] + time.process_time() - cpu,
                 "wall": spent["wall"] + time.perf_counter() - wall}
        run.iteration += 1
        if spent["cost"] >= next_at or run.iteration == cfg.iterations:
            next_at = (spent["cost"] // job.every + 1) * job.every
            kept = {k: log[k] for k in ("diversity", "zero_std_frac") if k in log}
            out["points"].append({"iteration": run.iteration, **spent, **kept, **observe(run),
                                  "train_reward": log.get("reward")})
    out["failed"] = failed[-1] if len(failed) == 3 else ""
    T.save_atomic(json.dumps(out), job.path)
    return out

def run_jobs(jobs: dict, workers: int) -> dict:
    """Results by key; what is cached is read, the rest runs in `workers` processes."""
    import concurrent.futures as futures
    import multiprocessing
    todo = {job.path: job for job in jobs.values() if not job.path.exists()}
    for model in {job.cfg.model for job in todo.values() if is_tiny(job.cfg)}:
        T.tiny_base(model)  # once, before the workers all want it
    with contextlib.ExitStack() as ends:
        done = map(run_job, todo.values())
        if min(workers, len(todo)) > 1:
            spawn = multiprocessing.get_context("spawn")
            pool = ends.enter_context(futures.ProcessPoolExecutor(workers, spawn))
            jobs_ = [pool.submit(run_job, job) for job in todo.values()]
            done = (job.result() for job in futures.as_completed(jobs_))
        for n, r in enumerate(done, 1):
            cfg, points = r["config"], r["points"]
            print(f"[{n}/{len(todo)}] {cfg['method']} seed {cfg['seed']} lr {cfg['lr']:g}: reward "
                  f"{points[0]['reward']:.3f} -> {points[-1]['reward']:.3f}, peak {peak(r):.3f}, "
                  f"{points[-1]['wall']:.0f} s {r['failed']}", flush=True)
    return {key: json.loads(job.path.read_text()) for key, job in jobs.items()}

def peak(result: dict) -> float:
    return max(p["reward"] for p in result["points"])

def final(result: dict) -> float:
    return result["points"][-1]["reward"]

def fall(result: dict) -> float:
    """The most that the reward ever was below its best so far."""
    rewards = [p["reward"] for p in result["points"]]
    best = itertools.accumulate(rewards, max)
    return max(b - r for b, r in zip(best, rewards, strict=True))

def start_costs(result: dict) -> dict[int, int]:
    """Cost of a prompt in one iteration, by the step where the window starts."""
    cfg = T.Config(**result["config"])
    return {i: T.forward_equivalents(s, cfg) for i, s in schedules(cfg).items()}

def cost_to(points: list[dict], level: float, unit: str = "cost") -> float:
    """Cost at which the reward first reaches a level, linear between evaluations; inf if never."""
    if points[0]["reward"] >= level:
        return points[0][unit]
    for a, b in itertools.pairwise(points):
        if b["reward"] >= level:
            share = (level - a["reward"]) / (b["reward"] - a["reward"])
            return a[unit] + share * (b[unit] - a[unit])
    return math.inf

def compare_command(args) -> None:
    """train methods on equal denoiser cost; flags that it does not know go to treegrpo.py"""
    rows, out = variants(args), Path(args.out or "runs/compare")
    every = args.every or max(1, args.budget // 10)
    both = set(args.seeds) & set(args.tune_seeds if args.tune else ())
    T.require(not both, f"--tune-seeds {' '.join(map(str, both))}: are in --seeds, and the best of "
              "several trials is no fair result; take other seeds")
    def job(label: str, seed: int, trial: str = "", every: int = every) -> Job:
        return make_job([*rows[label], *settings(trial)], seed, args.budget, every, out)
    trials = {(m, trial, seed): job(m, seed, trial, args.budget)  # evaluated at the end only
              for m in args.methods for trial in args.tune for seed in args.tune_seeds}
    for label in rows:
        job(label, 0)  # refuses bad flags before anything runs
    trials = run_jobs(trials, args.jobs)
    ends = {m: {trial: statistics.mean(final(trials[m, trial, seed]) for seed in args.tune_seeds)
                for trial in args.tune} for m in args.methods if args.tune}
    for m, by_trial in ends.items():
        rows[m] += settings(max(by_trial, key=by_trial.get))
    done = run_jobs({(label, seed): job(label, seed) for label in rows for seed in args.seeds},
                    args.jobs)
    write_comparison(args, out, {r: [done[r, s] for s in args.seeds] for r in rows}, ends)

def summarise(results: list[dict], levels: list[float], baselines: dict) -> dict:
    """A row of the table: medians over seeds, of the reward with [least, most]."""
    cfg, last, clock = T.Config(**results[0]["config"]), [], results[0]["seconds"]
    steps, last = T.schedule(cfg, 0), [r["points"][-1] for r in results]
    def median(name: str) -> float:
        return statistics.median([p[name] for p in last if name in p] or [math.nan])
    def to(level: float, unit: str = "cost", of=results) -> float:
        return statistics.median(cost_to(r["points"], level, unit) for r in of)
    row = {"leaves": cfg.roots * math.prod(s.children for s in steps),
           "trained nodes": T.nfe(steps, cfg.roots)[1], "lr": cfg.lr,
           "prompts": cfg.prompts_per_iteration}
    for measured in (peak, final, fall):
        values = list(map(measured, results))
        row[measured.__name__] = [statistics.median(values), min(values), max(values)]
    row |= {f"cost to {x:g}": to(x) for x in levels}
    row |= {"cost": median("cost"), "iterations": median("iteration"),
            "s/iteration": statistics.median(p[clock] / max(1, p["iteration"]) for p in last)}
    for name, base in baselines.items():
        best = statistics.median(map(peak, base))
        for unit, key in (("cost", "cost"), ("seconds", clock)):
            mine, theirs = to(best, key), to(best, key, base)
            row[f"{unit} to best of {name}, ×"] = theirs / mine if 0 < mine < math.inf else math.nan
    return row | {"diversity of leaves": median("diversity"), "places": median("places"),
                  "diversity of evaluation": median("eval_diversity")}

def write_comparison(args, out: Path, results: dict, ends: dict) -> None:
    """compare.md, compare.json, pareto.png, credit.png."""
    baselines, every = {b: results[b] for b in args.baseline}, sum(results.values(), [])
    rows = {label: summarise(r, args.levels, baselines) for label, r in results.items()}
    bases = sorted({round(r["points"][0]["reward"], 4) for r in every})
    cells = [[label, *("{:.3f} [{:.3f}, {:.3f}]".format(*v) if isinstance(v, list) else number(v)
                       for v in row.values())] for label, row in rows.items()]
    lines = [f"# Equal cost: {args.budget:,} forward-equivalents, seeds "
             f"{' '.join(map(str, args.seeds))}", "", f"`{args.line}`", "",
             *table(["method", *next(iter(rows.values()))], cells), "",
             f"Reward of the base: {', '.join(map(str, bases))}"
             f"{' (samplers or cached bases differ)' * (len(bases) > 1)}. Medians over seeds "
             "[least, most]. Cost: a forward pass is 1, a backward pass 2, evaluation is free; "
             f"seconds are {every[0]['seconds']} seconds, without evaluation. ×: how much less is "
             "needed to reach the median best reward of that baseline."]
    if ends:
        lines += ["", f"Final reward of the trials, seeds {' '.join(map(str, args.tune_seeds))}, "
                  "mean", "", *table(["trial", *ends], [
                      [trial, *(f"{ends[m][trial]:.3f}" for m in ends)] for trial in args.tune])]
    costs = {label: start_costs(r[0]) for label, r in results.items()}
    starts = sorted(set().union(*costs.values()))
    lines += ["", "Cost of a prompt, by the step where the window starts", "",
              *table(["method", *starts], [[label, *(row.get(i, "") for i in starts)]
                                           for label, row in costs.items()])]
    lines += [f"\n{label} stopped early: {r['failed']}" for label, runs in results.items()
              for r in runs if r["failed"]]
    publish(out, "compare", lines, {"command": args.line, "rows": rows, "tuning": ends},
            pareto=functools.partial(draw_pareto, results, args.levels),
            credit=functools.partial(draw_credit, results))

def draw_pareto(results: dict, levels: list[float], path: Path) -> None:
    """Reward against cost and against seconds; median of the seeds, shaded from worst to best."""
    import numpy as np
    clock = next(iter(results.values()))[0]["seconds"]
    with figure(path, (11, 4.8), 1, 2, sharey=True) as (fig, [axes]):
        for (n, (label, runs)), k in itertools.product(enumerate(results.items()), range(2)):
            style = {"color": f"C{n % 10}", "ls": ("-", "--", ":", "-.")[n // 10 % 4]}
            ax, unit = axes[k], ("cost", clock)[k]
            grid = np.linspace(0, min(r["points"][-1][unit] for r in runs), 60)
            curves = [np.interp(grid, *([p[key] for p in r["points"]] for key in (unit, "reward")))
                      for r in runs]
            ax.fill_between(grid, np.min(curves, 0), np.max(curves, 0), color=style["color"],
                            alpha=0.15, lw=0)
            ax.plot(grid, np.median(curves, 0), label=label, **style)
        for ax, name in zip(axes, ("cost in forward-equivalents", f"{clock} seconds"), strict=True):
            ax.hlines(levels, *ax.get_xlim(), color="grey", lw=0.6, ls=":")
            ax.set(xlabel=name)
            ax.grid(alpha=0.25)
        axes[0].set(ylabel="reward, full ODE sampler")
        fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)

def draw_credit(results: dict, path: Path) -> None:
    """Advantage by leaf and step of one rollout of the base; below, its mean size by step, and
    what a prompt costs by the step where the window starts.
    """
    runs = {label: r[0] for label, r in results.items()}
    limit = max(abs(a) for r in runs.values() for x in r["credit"]["example"] for a in x.values())
    size = 1.5 + 2.2 * len(runs), 5.6
    with figure(path, size, 3, len(runs), height_ratios=(3, 1, 1), sharey="row") as (fig, axes):
        for (label, run), top, *low in zip(runs.items(), *axes, strict=True):
            steps, mean = run["config"]["steps"], run["credit"]["size"]
            grid = [[x.get(str(i), math.nan) for i in range(steps)]
                    for x in run["credit"]["example"]]
            image = top.imshow(grid, aspect="auto", cmap="coolwarm_r", vmin=-limit, vmax=limit,
                               extent=(-0.5, steps - 0.5, 1, 0), interpolation="nearest")
            top.set(title=label, yticks=[], facecolor="0.92")
            for ax, bars in zip(low, (mean, start_costs(run)), strict=True):
                ax.bar(list(map(int, bars)), list(bars.values()), color="grey")
                ax.set(xlim=(-0.5, steps - 0.5))
            low[0].set(xlabel="denoising step")
            low[1].set(xlabel="start of the window")
        for ax, name in zip(axes[:, 0], ("leaves", "mean |A|", "cost"), strict=True):
            ax.set(ylabel=name)
        fig.colorbar(image, ax=axes[0], label="advantage", aspect=30, pad=0.01)

# ==== 10. check: silent faults of a model and a method ==========================================
class Check:
    """Each `check_` method is a row -> what to do if it fails. It returns (passed, measured)."""

    def __init__(self, cfg: T.Config):
        self.cfg, self.run, self.logs, self.gradients = cfg, T.Run(cfg), [], []
        self.policy, self.trainable = self.run.policy, self.run.trainable
        self.slots, self.prompts = T.draw_prompts(cfg, self.run.prompts, 0)
        self.cond = self.policy.encode(self.prompts)
        self.tree, _, self.rewards = self.run.grow(0, self.slots, self.prompts)
        self.start, self.fixed = copies(self.trainable), self.frozen()

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the policy's modules by name."""
        parts = vars(self.policy) | getattr(vars(self.policy).get("pipe"), "components", {})
        modules = {m: name for name, m in parts.items() if isinstance(m, nn.Module)}
        return {f"{part}.{name}": t for m, part in modules.items()
                for name, t in (*m.named_parameters(), *m.named_buffers())}

    def names(self, picked: list[bool]) -> list[str]:
        """Names of some of the trained parameters."""
        known = {id(t): name for name, t in self.tensors().items()}
        names = [known.get(id(p), f"parameter {n}") for n, p in enumerate(self.trainable)]
        return list(itertools.compress(names, picked))

    def frozen(self) -> dict[str, tuple[float, float]]:
        """Two sums of every parameter and buffer that is not trained."""
        mine = set(map(id, self.trainable))
        return {k: (t.double().sum().item(), t.double().square().sum().item())
                for k, t in self.tensors().items() if id(t) not in mine}

    @torch.no_grad()
    def check_sampler(self):
        """noise 0 is the plain ODE sampler -> the sampler is not the one that is evaluated and
        deployed: compare policy.grid and policy.step with the scheduler, look for dropout"""
        policy, owner, worst = self.policy, torch.arange(len(self.slots)), 0.0
        x = noise = T.tree_noise(("check",), self.slots, policy.shape)(0, owner)
        steps = T.ode_steps(range(self.cfg.steps + 1))
        for step in steps:
            parts = []
            for nodes, *_ in T.node_batches(len(x), owner, self.cfg.micro_batch):
                pred, mean, std = T.transition(policy, x[nodes], owner[nodes], step, self.cond)
                want = reference_step(policy, x[nodes].to(pred), pred, step)
                worst = max(worst, relative(mean, want), abs(std.item()))
                parts.append(mean.cpu())
            x = torch.cat(parts)
        tree = self.run.grow_tree(("check",), self.slots, self.prompts, steps)
        theirs = pipeline_latents(policy, self.prompts[0], noise[:1])
        same = relative(tree.leaves, x)
        text, ok = f"worst step {worst:.1e}, rollout {same:.1e}", max(worst, same) < 1e-5
        if theirs is not None:
            far, limit = relative(x[:1], theirs), 1e-3 if self.cfg.dtype == "fp32" else 0.1
            text, ok = f"{text}, pipeline {far:.1e}", ok and far < limit
        return ok, text

    def check_ratio(self):
        """ratio is 1 before an update -> the update sees another model than the rollout: switch
        dropout off (eval mode), use the same micro-batch and precision in both"""
        cfg, worst = dataclasses.replace(self.cfg, kl=0.0, sft=0.0), {}
        for level in (level for level in self.tree.levels if level.step.train):
            more = self.cond, cfg, *[torch.zeros(len(level.parent))] * 2, None
            stats = [T.micro_batch_loss(self.policy, level, batch, *more)[1] for batch in
                     T.node_batches(len(level.x), level.parent, cfg.micro_batch)]
            worst[level.step.i] = max((s["ratio"] - 1).abs().max().item() for s in stats)
        limit = float(T.clip_range(cfg, torch.zeros(1), math.prod(self.policy.shape))) / 10
        return max(worst.values()) <= limit, "worst |ratio - 1| by step: " + " ".join(
            f"{v:.0e}" if v else "0" for v in worst.values()) + f" (limit {limit:.1e})"

    @torch.no_grad()
    def check_kl(self):
        """KL to the reference is 0 at first -> policy.reference() is not the model that training
        starts from: LoRA B must start at 0 and `initial` hold the loaded weights"""
        worst, some = 0.0, slice(self.cfg.micro_batch)
        for level in self.tree.levels:
            here = level.x[some], level.prompt[some], level.step, self.cond
            _, mean, std = T.transition(self.policy, *here)
            with self.policy.reference():
                reference = T.transition(self.policy, *here)[1]
            worst = max(worst, T.gaussian_kl(mean, reference, std).max().item())
        return worst <= 1e-9, f"worst {worst:.1e}"

    def check_spread(self):
        """rewards differ within a prompt -> without spread there is no gradient: raise
        --noise-level or --branch, or check what the reward returns"""
        total, parts = self.run.weights @ self.rewards, []
        for level, v in zip(self.tree.levels, T.backup(self.tree, total), strict=True):
            _, std, k = T.group_stats(v, level.parent)
            parts += [f"step {level.step.i} {std[k > 1].mean():.3f}, "] * bool((k > 1).any())
        std = T.group_stats(total, self.tree.groups(self.cfg.group))[1]
        return bool((std > T.MIN_SPREAD).any()), (
            f"std among siblings: {''.join(parts)}all leaves {std.mean():.3f}")

    def check_cost(self):
        """denoiser evaluations as planned -> an evaluation is wasted or missing: look for calls of
        policy.predict outside rollout and update, and for failed iterations"""
        cfg, wanted, got = self.cfg, [], []
        for n in range(2):
            log = self.run.train_iteration()
            self.run.iteration += 1
            self.logs.append(log)
            self.gradients.append([p.grad.abs().max().item() for p in self.trainable])
            got.append([int(log[f"evaluations_{phase}"]) for phase in ("sample", "update")])
            each = len(self.slots) * (2 if self.policy.guided else 1)
            wanted.append([c * each for c in T.nfe(T.schedule(cfg, n), cfg.roots, cfg.inner_epochs,
                                                   cfg.kl, cfg.anchor)])
        return got == wanted, f"[to sample, to train] {got[0]}, planned {wanted[0]}"

    def check_moves(self):
        """an update moves every trainable -> these weights get no gradient: they are unused in
        denoise, are detached, or should not be in policy.trainable"""
        still = self.names([torch.equal(a, p) or not any(grads) for a, p, *grads in zip(
            self.start, self.trainable, *self.gradients, strict=True)])
        return not still, counted(len(self.start), still)

    def check_frozen(self):
        """and nothing else -> a frozen weight or buffer changed: set requires_grad_(False) and
        eval mode on all but the trainables"""
        now = self.frozen()
        return now == self.fixed, counted(len(now), [k for k in now if now[k] != self.fixed.get(k)])

    def check_checkpoint(self):
        """checkpoint round trip -> a resumed run would differ: Run.save and Run.load must cover
        weights, average and optimiser"""
        run = self.run
        def state() -> list[Tensor]:
            moments = [v for p in run.trainable for v in run.optimizer.state[p].values()]
            return copies([*run.trainable, *run.ema, *moments])
        before = state()
        run.save()
        for p in (*run.trainable, *run.ema):
            p.data.zero_()
        run.optimizer.state.clear()
        run.load(self.cfg.folder / "last.pt")
        lost = sum(not torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        return not lost, counted(len(before), lost * ["a tensor"])

    def check_export(self):
        """export round trip -> exported weights are not the trained ones: policy.export and
        policy.restore must cover every trainable, with the LoRA scale"""
        kept = copies(self.trainable)
        self.policy.export(self.cfg.folder / "best")
        for p in self.trainable:
            p.data.zero_()
        self.policy.restore(self.cfg.folder / "best")
        lost = [not torch.equal(a, p) for a, p in zip(kept, self.trainable, strict=True)]
        for p, v in zip(self.trainable, kept, strict=True):
            p.data.copy_(v)
        return not any(lost), counted(len(kept), self.names(lost))

def copies(tensors) -> list[Tensor]:
    return [torch.as_tensor(t).detach().clone() for t in tensors]

def counted(total: int, bad: list[str]) -> str:
    return f"{total - len(bad)} of {total} tensors" + f"; not {', '.join(bad[:3])}" * bool(bad)

def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()

def reference_step(policy, x: Tensor, pred: Tensor, step: T.Step) -> Tensor:
    """Euler step of a flow, or DDIM without noise, written out in float64."""
    x, pred, now, then = (t.double() for t in (x, pred, policy.grid[step.i], policy.grid[step.j]))
    if policy.kind == "flow":
        return (x + (then - now) * pred).float()
    noise = pred if policy.kind == "eps" else now.sqrt() * pred + (1 - now).sqrt() * x
    data = (x - (1 - now).sqrt() * noise) / now.sqrt()
    return (then.sqrt() * data + (1 - then).sqrt() * noise).float()

@torch.no_grad()
def pipeline_latents(policy, prompt: str, noise: Tensor) -> Tensor | None:
    """Final latents of the diffusers pipeline's own loop; None where there is no pipeline."""
    pipe = getattr(policy, "pipe", None)
    if pipe is None:
        return None
    kept, flux, cfg = pipe.scheduler, "Flux" in type(pipe).__name__, policy.cfg
    if policy.kind != "flow":
        from diffusers import DDIMScheduler
        pipe.scheduler = DDIMScheduler.from_config(kept.config, clip_sample=False)
    packed = F.pixel_unshuffle(noise, 2).flatten(2).mT if flux else noise
    pipe.set_progress_bar_config(disable=True)
    try:
        with torch.autocast(policy.device.type, policy.dtype, enabled=cfg.dtype != "fp32"):
            x = pipe(prompt, latents=packed.to(policy.device), height=cfg.resolution,
                     width=cfg.resolution, num_inference_steps=cfg.steps,
                     guidance_scale=cfg.guidance, output_type="latent").images.float().cpu()
    finally:
        pipe.scheduler = kept
    patches = [s // 2 for s in noise.shape[2:]]
    return F.pixel_shuffle(x.mT.unflatten(2, patches), 2) if flux else x

def run_checks(check: Check) -> list[tuple[str, str, str, str]]:
    """Rows (result, name, measured, advice)."""
    rows = []
    for method in (m for name, m in vars(Check).items() if name.startswith("check_")):
        name, _, advice = " ".join(method.__doc__.split()).partition(" -> ")
        try:
            ok, text = method(check)
        except Exception as e:  # a row of the table, not the end of it
            ok, text = False, f"{type(e).__name__}: {e}".splitlines()[0]
        rows.append(("ok" if ok else "FAIL", name, text, advice * (not ok)))
    for name in vitals(check.logs[-1]) if check.logs else ():
        values, (low, high, advice) = [vitals(log)[name] for log in check.logs], HEALTH[name]
        ok = any(healthy(name, v) for v in values)
        rows.append(("ok" if ok else "look", name, f"{' '.join(f'{v:.3g}' for v in values)} "
                     f"(healthy: {low:g} to {high:g})", advice * (not ok)))
    return rows

def check_command(args) -> int:
    """find silent faults of a model and a method, given by flags of treegrpo.py; exit code 1"""
    with tempfile.TemporaryDirectory() as folder:
        check = Check(T.parse([*args.flags, "--out", folder]))
        rows = run_checks(check)
    width = max(len(r[1]) for r in rows)
    for result, name, text, advice in rows:
        print(f"{result:4}  {name:{width}}  {text}" + f"\n      -> {advice}" * bool(advice))
    failed = sum(r[0] == "FAIL" for r in rows)
    print(f"{check.cfg.method} on {check.cfg.model}: {failed or 'no'} fault{'s' * (failed != 1)}; "
          f"peak memory {check.run.mark()['memory']:.2f} GiB")
    return int(failed > 0)

# ==== 11. why: noise and bias of the policy gradient ============================================
# Noise of an estimator: evaluations it needs until its standard error equals its mean, that is
# cost x tr Cov / |mean|^2. It does not depend on the scale, which Adam and the rate absorb.
class GaussianFlow(T.Policy):
    """Data N(0, 1): the velocity in closed form, plus a bias theta for each step and prompt."""
    kind, guided, shape, device = "flow", False, (1, 1, 1), torch.device("cpu")
    best, width = 1.0, 0.5  # reward exp(-(x - best)^2 / (2 width^2))

    def __init__(self, cfg: T.Config):
        self.cfg, self.grid = cfg, torch.linspace(1, 0, cfg.steps + 1)

    def denoise(self, x, i, cond):
        s = self.grid[i]  # x = (1 - s) data + s noise; v = E[noise - data | x]
        return x * (2 * s - 1) / ((1 - s) ** 2 + s**2) + cond["theta"][:, i].view(-1, 1, 1, 1)

    def reward(self, x: Tensor) -> Tensor:
        return torch.exp(-((x.flatten() - self.best) ** 2) / (2 * self.width**2))

def exact_gradient(cfg: T.Config) -> Tensor:
    """Gradient of the expected reward by theta at the trained steps, in closed form -> (T,)."""
    policy, mean, var = GaussianFlow(cfg), 0.0, 1.0
    gradient, probe = torch.zeros(cfg.steps, dtype=torch.float64), torch.zeros(3, cfg.steps)
    probe[2] = 1
    for step in T.schedule(cfg, 0):  # a step is affine in x and theta
        x = torch.tensor([0.0, 1, 0]).view(3, 1, 1, 1)
        _, y, std = T.transition(policy, x, torch.arange(3), step, {"theta": probe})
        zero, by_x, by_theta = y.double().flatten().tolist()
        mean, var = zero + (by_x - zero) * mean, (by_x - zero) ** 2 * var + std.item() ** 2
        gradient *= by_x - zero
        gradient[step.i] = (by_theta - zero) * step.train
    total, gap = policy.width**2 + var, policy.best - mean
    return gradient * gap / total * policy.width / total**0.5 * math.exp(-gap**2 / (2 * total))

def policy_gradient(policy, tree, adv, cond, cfg: T.Config) -> None:
    """Add the gradient of the loss to the leaves of the graph, by the trainer's own functions."""
    for level, a, w in zip(tree.levels, adv, T.edge_weights(tree, cfg), strict=True):
        for batch in T.node_batches(len(level.x), level.parent, cfg.micro_batch):
            if level.step.train:
                T.micro_batch_loss(policy, level, batch, cond, cfg, a, w)[0].backward()

def gaussian_estimates(cfg: T.Config, trees: int, raw: bool = False) -> Tensor:
    """Independent estimates of the gradient, one per tree -> (trees, T) float64.

    raw: the leaves' rewards are backed up as they are, instead of (S - mean) / std.
    """
    policy, gen = GaussianFlow(cfg), torch.Generator().manual_seed(0)
    theta = torch.zeros(trees, cfg.steps, requires_grad=True)  # one copy of the parameters per tree
    tree = T.rollout(policy, {"theta": theta.detach()}, torch.arange(trees).repeat_interleave(
        cfg.roots), T.schedule(cfg, 0), lambda level, prompt: torch.randn(
            len(prompt), 1, 1, 1, generator=gen), cfg.micro_batch)
    rewards = policy.reward(tree.leaves)
    adv = (T.normalize_siblings(tree, T.backup(tree, rewards), cfg.sibling_norm) if raw else
           T.edge_advantages(tree, rewards, cfg))
    policy_gradient(policy, tree, adv, {"theta": theta}, cfg)
    return -theta.grad.double() * trees * sum(level.step.train for level in tree.levels)

def estimators() -> dict[str, T.Config]:
    """Rows of the study; all with 27 leaves, all but the first on the same three steps."""
    window = "--anchor 0 --window-mode fixed --window-start 2 --micro-batch 1000000 "
    chains, tree = window + "--sibling-norm none --loss-reduce layer ", window + "--sibling-norm "
    flags = {"flat, all steps": chains + "--roots 27 --branch 1 --depth 0 --window-start 0",
             "flat, window": chains + "--roots 27 --branch 1",
             "MixGRPO: one branching, chains": chains + "--branch 27 1"}
    flags |= {f"tree, {norm}, {by}": f"{tree}{norm} --loss-reduce {by}" for norm, by in
              itertools.product(("none", "center", "std", "depth"), ("layer", "edges"))}
    flags["tree + 2-step tail, center, layer"] = tree + "center --loss-reduce layer --tail-steps 2"
    return {name: T.parse(f.split()) for name, f in flags.items()}

def moments(g: Tensor) -> Tensor:
    """|mean|^2 without bias, tr Cov, variance of the first (jackknife); g (n >= 3, D) -> (3,)."""
    n, own = len(g), g.square().sum(1)
    others = g @ g.sum(0) - own  # products with the other estimates
    signal = others.sum() / (n * (n - 1))
    left_out = (others.sum() - 2 * others) / ((n - 1) * (n - 2))
    return torch.stack([signal, own.mean() - signal, (n - 1) * left_out.var(correction=0)])

def noise(cfg: T.Config, sums: Tensor) -> dict[str, float]:
    """Noise of an estimator, and what it is within two standard errors."""
    (signal, spread, error), cost = sums.tolist(), T.forward_equivalents(T.schedule(cfg, 0), cfg)
    parts = {"noise": signal, "least": signal + 2 * error**0.5, "most": signal - 2 * error**0.5}
    return {"cost": cost} | {k: cost * spread / s if s > 0 else math.inf for k, s in parts.items()}

def gaussian_study(trees: int) -> dict[str, dict]:
    """Noise, and the angle between the mean of an estimator and the exact gradient."""
    out = {}
    for name, cfg in estimators().items():
        g = gaussian_estimates(cfg, trees)
        sums, cosine = moments(g), F.cosine_similarity(g.mean(0), exact_gradient(cfg), 0)
        angles = torch.stack([cosine.clamp(max=1).acos(), (sums[1] / trees / sums[0]).sqrt()])
        out[name] = noise(cfg, sums) | dict(zip(("angle", "error"), angles.rad2deg().tolist(),
                                                strict=True))
    return out

TINY_ROWS = ("flat, all steps", "MixGRPO: one branching, chains", "tree, none, edges",
             "tree, center, edges", "tree, center, layer", "tree, std, edges",
             "tree + 2-step tail, center, layer")

def tiny_study(trees: int, states: int) -> dict[str, dict]:
    """Noise of the whole gradient of the tiny model at fixed prompts and initial noise."""
    run, rows = T.Run(T.parse([])), {name: estimators()[name] for name in TINY_ROWS}
    rows["flat, all steps"] = dataclasses.replace(rows["flat, all steps"], roots=1, branch=(27, 1))
    grow = functools.cache(functools.partial(grow_at, run))  # credit rules share their trees
    return {name: noise(cfg, sum(moments(torch.stack([
        tiny_gradient(run, *grow(state, n, tuple(T.schedule(cfg, 0))), cfg) for n in range(trees)]))
        for state in range(states))) for name, cfg in rows.items()}

def grow_at(run: T.Run, state: int, n: int, steps):
    """Tree n of a fixed prompt and initial noise -> tree, its prompt, rewards."""
    prompt, shape = run.prompts[5 * state % len(run.prompts)], run.policy.shape
    first, later = (T.tree_noise(key, [0], shape) for key in (("why", state), ("why", state, n)))
    tree = T.rollout(run.policy, run.policy.encode([prompt]), torch.tensor([0]), steps,
                     lambda level, p: (later if level else first)(level, p), run.cfg.micro_batch)
    images = run.decode(tree.leaves)
    return tree, [prompt], T.score(run.rewards, images, [prompt] * len(images))

def tiny_gradient(run: T.Run, tree, prompt, rewards, cfg: T.Config) -> Tensor:
    for p in run.trainable:
        p.grad = None
    adv = T.edge_advantages(tree, rewards, cfg, run.weights)
    policy_gradient(run.policy, tree, adv, run.policy.encode(prompt), cfg)
    return torch.cat([p.grad.flatten() for p in run.trainable if p.grad is not None])

def why_command(args) -> None:
    """noise and bias of the policy gradient per denoiser evaluation: flat, MixGRPO, tree"""
    T.allow(args.tiny_trees > 2 or not args.tiny_trees, "tiny-trees", args.tiny_trees, "0 or >= 3")
    torch.set_num_threads(1)
    gauss, out = gaussian_study(args.trees), Path(args.out or "runs/why")
    tiny = tiny_study(args.tiny_trees, args.states) if args.tiny_trees else {}
    rows = [[name, r["cost"], number(r["noise"]), f"{r['angle']:.1f} ± {r['error']:.1f}",
             "{} [{}, {}]".format(*(number(tiny[name][k]) for k in ("noise", "least", "most")))
             if name in tiny else ""] for name, r in gauss.items()]
    lines = [f"Gaussian flow: {args.trees:,} trees a row; tiny: {args.tiny_trees} trees at each of "
             f"{args.states} fixed prompts and initial noises. 27 leaves. Noise: evaluations until "
             "the standard error of the gradient equals its mean, in brackets within two standard "
             "errors (–: unbounded). Angle: between the estimator's mean and the exact gradient.",
             "", *table(("estimator", "evaluations", "noise, Gaussian", "angle, degrees",
                         "noise, tiny"), rows)]
    studies = {"one-dimensional Gaussian flow": gauss, "tiny, fixed states": tiny}
    publish(out, "why", lines, {"gaussian": gauss, "tiny": tiny},
            why=functools.partial(draw_why, {k: v for k, v in studies.items() if v}))

def draw_why(studies: dict, path: Path) -> None:
    """Noise of each estimator; on the Gaussian flow with the angle of its bias."""
    with figure(path, (6 * len(studies), 5), 1, len(studies)) as (_, [axes]):
        for ax, (title, rows) in zip(axes, studies.items(), strict=True):
            names, values, labels = list(rows)[::-1], [], []
            for r in (rows[name] for name in names):
                open_end = math.isinf(r["most"])  # only the least is known
                values.append(r["least" if open_end else "noise"])
                angle = f"  ({r['angle']:.0f}°)" if "angle" in r else ""
                labels.append(f" {'> ' * open_end}{number(values[-1])}{angle}")
            bars = ax.barh(names, values, color=["C0" if "tree" in n else "grey" for n in names])
            ax.bar_label(bars, labels, fontsize=8)
            ax.set(title=title, xlabel="evaluations until error = gradient", xscale="log",
                   xlim=(min(values) / 2, 4 * max(values)))

# ==== 12. Command line ==========================================================================
def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)

def flag(text: str, default=None, kind=str, many: bool = False, metavar: str = "X", **how) -> dict:
    """Arguments of add_argument."""
    return {"help": text, "default": default, "type": kind, "metavar": metavar,
            "nargs": "+" if many else None} | how

FLAGS = {
    "run": flag("run folder", metavar="RUN"),
    "runs": flag("run folders", many=True, metavar="RUN"),
    "texts": flag("prompts", many=True, metavar="PROMPT"),
    "--n": flag("images per prompt [sample: 8; score: 16, real models 4]", kind=positive),
    "--seed": flag("seed of the noise [0]", 0, int),
    "--weights": flag("best, last or base [best]", "best", choices=("best", "last", "base")),
    "--out": flag("[sample: RUN/sample.png; folders: RUN/score, runs/compare, runs/why]"),
    "--prompts": flag("file, or hpdv2 [tiny: all captions, else hpdv2]"),
    "--metrics": flag(f"shapes, {', '.join(SCORERS | METRICS)}, MODULE:FUNCTION [the runs' rewards "
                      "and metrics they were not trained for]", many=True),
    "--reward-weights": flag("NAME=FOLDER ...", (), many=True),
    "--iteration": flag("whose tree is drawn [the last]", kind=int),
    "--methods": flag("presets, a row each", (), many=True),
    "--set": flag("more rows, LABEL:METHOD:flag=value,... : presets with other flags", (),
                  many=True),
    "--seeds": flag("[0]", (0,), int, many=True),
    "--budget": flag("cost of each run [200000]", 200_000, positive),
    "--every": flag("cost between evaluations [budget / 10]", kind=positive),
    "--tune": flag("trials, flag=value,... : each row of --methods takes the one that ends best, "
                   "in the mean of", (), many=True),
    "--tune-seeds": flag("these seeds, none of --seeds [1000]", (1000,), int, many=True),
    "--jobs": flag("processes, one thread each [1]", 1, positive),
    "--levels": flag("rewards for which the cost is given [.6 .7 .8]", (0.6, 0.7, 0.8), float,
                     many=True),
    "--baseline": flag("rows to beat", (), many=True),
    "--trees": flag("per row, Gaussian flow [20000]", 20_000, positive),
    "--tiny-trees": flag("per row and state, tiny; 0: none, else at least 3 [32]", 32, int),
    "--states": flag("fixed prompts and noises, tiny [3]", 3, positive),
}
COMMANDS = {  # name: (function, its arguments)
    "draw": (draw_command, "run --iteration"),
    "sample": (sample_command, "run texts --n --seed --weights --out"),
    "score": (score_command, "runs --n --seed --weights --out --prompts --metrics "
                             "--reward-weights"),
    "compare": (compare_command, "--methods --set --seeds --budget --every --tune --tune-seeds "
                                 "--jobs --levels --baseline --out"),
    "check": (check_command, ""),
    "why": (why_command, "--trees --tiny-trees --states --out"),
}
FORWARD = ("compare", "check")  # their unknown flags are flags of treegrpo.py

def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = T.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__,
                                      epilog=health_text() if name == "check" else None,
                                      formatter_class=argparse.RawDescriptionHelpFormatter,
                                      allow_abbrev=False)
        for argument in arguments.split():
            command.add_argument(argument, **FLAGS[argument])
    try:
        args, args.flags = parser.parse_known_args(argv)
        T.require(not args.flags or args.command in FORWARD, f"unknown flag {args.flags[:1]}")
        args.line = f"python evaluate.py {shlex.join(argv)}"
        return COMMANDS[args.command][0](args) or 0
    except (T.UsageError, T.RewardError, T.NumericalError, OSError) as e:
        print(f"evaluate: {e}", file=sys.stderr)
        return 2 if isinstance(e, T.UsageError) else 1

if __name__ == "__main__":
    sys.exit(importlib.import_module("evaluate").main())  # one module for treegrpo.py and us
