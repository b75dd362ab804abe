#!/usr/bin/env python
"""Look at the runs of treegrpo.py: pictures, samples, and measurements with intervals.

    python evaluate.py draw RUN                    # curve.png, grid.png, tree.png: as in training
    python evaluate.py sample RUN "a red circle"   # images from the best weights
    python evaluate.py score RUN [RUN ...]         # paired comparison of runs with their base model

Images come from the deterministic (ODE) sampler, trees from the rollout that trains. `score` gives
the base and every run the same prompts and noise, so that differences are paired; it keeps images
as 8-bit PNGs, a strip per prompt, in RUN/eval-HASH (of the base in base-HASH beside the runs) and
reads them again next time. HASH covers model, weights, sampler, seed and images per prompt.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import hashlib
import html
import importlib
import io
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import treegrpo as T

# ==== What treegrpo.py says of a run ============================================================
def plan(cfg, dims: int | None = None) -> str:
    """What an iteration does and costs, beside flat GRPO with as many leaves."""
    starts = [cfg.window_start] if cfg.window_mode == "fixed" else range(cfg.steps - cfg.window)
    steps = [T.schedule(dataclasses.replace(cfg, window_mode="fixed", window_start=i), 0)
             for i in starts]
    sample = " ".join(str(T.nfe(s, cfg.roots)[0]) for s in steps)
    train = T.nfe(steps[0], cfg.roots, cfg.inner_epochs, cfg.kl > 0)[1]
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

# ==== 1. Runs ===================================================================================
def load_run(folder, weights: str = "best", rewards: bool = False) -> T.Run:
    """A run with its best, last or base weights; with its prompts and rewards only on request."""
    cfg = run_config(folder)
    run = T.Run(cfg if rewards else dataclasses.replace(cfg, reward=(), prompts=""))
    if weights == "last":
        run.load(cfg.folder / "last.pt")
        return run
    run.ema = []  # best weights are averages already
    try:
        if weights == "best":
            run.policy.restore(cfg.folder / "best")
    except Exception as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise T.UsageError(f"{folder}: no best weights there ({reason})") from None
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

# ==== 2. Pictures ===============================================================================
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

def short(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length - 1] + "…"

def save_png(image: Tensor, path: Path) -> None:
    """Write (3, H, W) in [0, 1]; the file is complete or absent."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    Image.fromarray((image * 255).round().byte().permute(1, 2, 0).cpu().numpy()).save(part, "png")
    os.replace(part, path)

def draw_run(run) -> None:
    """Write curve.png, grid.png and tree.png into the run's folder."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return print("no pictures: matplotlib is not installed (pip install matplotlib)")
    for name, draw in (("curve", draw_curve), ("grid", draw_before_after), ("tree", draw_tree)):
        draw(run, run.cfg.folder / f"{name}.png")
    print(f"pictures: {run.cfg.folder}/ curve.png grid.png tree.png")

def draw_curve(run, path: Path) -> None:
    """Training reward and ODE evaluation over iterations, from log.jsonl."""
    from matplotlib.figure import Figure

    cfg = run.cfg
    log = [json.loads(line) for line in (cfg.folder / "log.jsonl").read_text().splitlines()]
    reward = {r["iteration"]: r["reward"] for r in log if "reward" in r}
    values = {r["iteration"]: r["eval"] for r in log if "eval" in r}
    y, base, best = list(reward.values()), values.get(0, math.nan), max(values, key=values.get,
                                                                          default=0)
    smooth = [sum(w) / len(w) for w in (y[max(0, n - 4):n + 5] for n in range(len(y)))]
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    ax.plot(list(reward), y, "C1.", alpha=0.35, label="training reward (rollout)")
    ax.plot(list(reward), smooth, "C1", label="the same, mean of 9 iterations")
    ax.plot(list(values), list(values.values()), "C0o-", ms=4,
            label="evaluation (ODE, fixed prompts and noise)")
    ax.axhline(base, color="grey", ls="--", lw=1, label=f"base model: {base:.3f}")
    top = values.get(best, math.nan)
    ax.plot(best, top, "C0*", ms=16, mec="white",
            label=f"best: {top:.3f} ({top - base:+.3f}) at iteration {best}")
    ax.set(xlabel="iteration", ylabel=f"reward: {' + '.join(cfg.reward)}",
           title=f"{cfg.method} on {cfg.model}")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)

def draw_blocks(path: Path, title: str, captions: list[str], blocks: dict[str, Tensor]) -> None:
    """Named blocks of images (R, C, 3, H, W) side by side, a row per caption."""
    from matplotlib.figure import Figure

    rows, cols, _, side, _ = next(iter(blocks.values())).shape
    gap, size = max(1, side // 12), (2 + 0.75 * cols * len(blocks), 1 + 0.75 * rows)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, len(blocks), squeeze=False)[0]
    for ax, (name, images) in zip(axes, blocks.items(), strict=True):
        ax.imshow(tiles(images, gap).permute(1, 2, 0).numpy(), interpolation="nearest")
        ax.set_title(name, fontsize=10)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    middle = [r * (side + gap) + side / 2 for r in range(rows)]
    axes[0].set_yticks(middle, [short(c, 28) for c in captions])
    axes[0].tick_params(length=0)
    figure.savefig(path, dpi=110)

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
    draw_blocks(path, title, chosen, blocks)

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
        rows.insert(0, {n: sum(xs) / len(xs) for n, xs in above.items()})
    return rows

def tree_boxes(tree) -> list[dict[int, tuple[float, float, float]]]:
    """Centre and half side {node: (x, y, half)} of pictures, per row; unit: a leaf's width."""
    rows, boxes, y, above = tree_rows(tree), [], 0.0, 0.0
    width = max(rows[-1].values())
    for level, row in zip([None, *tree.levels], rows, strict=True):
        xs = sorted(row.values())
        gap = min((b - a for a, b in zip(xs, xs[1:], strict=False)), default=math.inf)
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
    from matplotlib.figure import Figure

    slots, prompts = T.draw_prompts(run.cfg, run.prompts, run.iteration)
    tree, images, rewards = run.grow(run.iteration, slots[:1], prompts[:1])
    adv, boxes = T.edge_advantages(tree, rewards, run.cfg, run.weights), tree_boxes(tree)
    (right, foot, half), top = list(boxes[-1].values())[-1], next(iter(boxes[0].values()))[2]
    unit = min(max(0.4, 6 / right), 30 / right)  # inches
    left, width, height = 0.3 - 1.35 / unit, right + 1, 3.4 * top - foot + half + 1.2
    figure = Figure((unit * (width - left) + 1.2, unit * height + 0.7), layout="constrained")
    ax, largest = figure.subplots(), max(a.abs().max().item() for a in adv) or 1.0
    colours = ScalarMappable(CenteredNorm(0, largest), "coolwarm_r")
    for d, row in enumerate(boxes):
        paint_row(ax, row, row_pictures(run, tree, images, d, list(row)),
                  (tree.levels[d - 1], adv[d - 1], boxes[d - 1]) if d else None, colours)
    paint_prefix(ax, run, tree, slots[0], boxes[0])
    label_rows(ax, tree, run.weights @ rewards, boxes, left)
    ax.set(xlim=(left, width), ylim=(3.4 * top - height, 3.4 * top), aspect="equal")
    ax.axis("off")
    bar = figure.colorbar(colours, ax=ax, shrink=0.7, aspect=30, pad=0.01)
    bar.set_label("advantage of an edge\n(blue: made likelier)")
    figure.suptitle(tree_title(run, tree, prompts[0], len(boxes[-1])), fontsize=12)
    figure.savefig(path, dpi=150)

def tree_title(run, tree, prompt: str, drawn: int) -> str:
    cfg, first, last, leaves = run.cfg, tree.levels[0].step, tree.levels[-1].step, len(tree.leaves)
    return (f"“{short(prompt, 90)}”: rollout of {cfg.method} on {cfg.model}, iteration "
            f"{run.iteration}\nwindow: steps {first.i + 1}–{last.j} of {cfg.steps}; "
            f"{f'first {drawn} of {leaves}' if drawn < leaves else leaves} leaves; "
            f"reward: {' + '.join(cfg.reward)}")

def row_pictures(run, tree, images: Tensor, d: int, nodes: list[int]) -> Tensor:
    """Predicted clean images at the nodes of level d; after the last level the final images."""
    if d == len(tree.levels):
        return thumbnails(images[nodes])
    level = tree.levels[d]
    clean = run.policy.denoised(level.x[nodes], level.pred[nodes], level.step.i)
    return thumbnails(run.decode(clean))

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

# ==== Scorers: rewards of `treegrpo.py --reward` and metrics of `score` =========================
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

def from_open_clip(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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

def clip_pixels(images: torch.Tensor, side: int, longest: bool = False) -> torch.Tensor:
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
    def text(prompt: str) -> torch.Tensor:  # (D,); a prompt that is too long loses its end
        ids = tokenizer([clean(prompt)], padding="max_length", truncation=True, max_length=77,
                        split_special_tokens=True, return_tensors="pt").input_ids
        return F.normalize(model.get_text_features(ids.to(device)).pooler_output)[0]

    def score(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        image = torch.cat([model.get_image_features(clip_pixels(x, side, hps)).pooler_output
                           for x in images.to(device).split(32)])
        return (F.normalize(image) * torch.stack([text(p) for p in prompts])).sum(1)
    return score

def jpeg_reward(sign: int, device, folder=None):
    """Sign times the size in kB as a JPEG of quality 95 (ddpo-pytorch)."""
    from PIL import Image
    def kilobytes(image: torch.Tensor) -> float:  # (3, H, W)
        pixels = (image.float() * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG", quality=95)
        return file.tell() / 1000
    return lambda images, prompts: torch.tensor([sign * kilobytes(i) for i in images])

def aesthetic_metric(device, folder: Path | None = None):
    """LAION aesthetic predictor v2 (about 1 to 10): an MLP on CLIP ViT-L/14's unit features.

    Local copies: a folder with the MLP's file and, in it, `clip-vit-large-patch14`.
    """
    from huggingface_hub import hf_hub_download

    repo, file, *_ = HUB["aesthetic"]
    widths = (768, 1024, 128, 64, 16, 1)
    # keys of the published file: layers.0, 2, 4, 6, 7 (dropout between, no activation)
    mlp = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))
    path = folder / file if folder else hf_hub_download(repo, file)
    state = torch.load(path, "cpu", weights_only=True)
    mlp.load_state_dict({f"{new}.{p}": state[f"layers.{old}.{p}"] for p in ("weight", "bias")
                         for new, old in enumerate((0, 2, 4, 6, 7))})
    mlp.to(device).requires_grad_(False)
    clip, _ = load_clip("clip", device, folder / "clip-vit-large-patch14" if folder else None)
    side = clip.config.vision_config.image_size

    def score(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        x = torch.cat([clip.get_image_features(clip_pixels(x, side)).pooler_output
                       for x in images.to(device).split(32)])
        return mlp(F.normalize(x))[:, 0]
    return score

def imagereward_metric(device, folder: Path | None = None):
    """ImageReward v1.0 (arXiv 2304.05977), through its own package, one image at a time."""
    try:
        import ImageReward
    except ImportError as e:
        raise ImportError(f"{e}; it runs the image-reward package, which needs OpenAI's clip "
                          "and transformers 4, hence an environment of its own") from None
    from PIL import Image

    local = folder and {"name": str(folder / "ImageReward.pt"),
                        "med_config": str(folder / "med_config.json")}
    model = ImageReward.load(**(local or {}), device=str(device))

    def score(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        pixels = (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        return torch.tensor([float(model.score(p, Image.fromarray(x)))
                             for p, x in zip(prompts, pixels, strict=True)])
    return score

def scorer(make, name: str, device, folder: Path | None = None):
    """make(device, folder), with one line for whatever is missing or wrong."""
    try:
        return make(device, folder)
    except T.UsageError:
        raise
    except Exception as e:
        what, place = " ".join(str(e).split()).partition(". ")[0], f" in {folder}" if folder else ""
        error = f"--reward {name}{place}: {what} ({type(e).__name__})"
        if name in HUB:
            repo, file, size, words = HUB[name]
            error += (f". It needs {file} ({size}) of {repo} and the tokenizer (vocab.json, "
                      f"merges.txt) of {words}, from the hub or --reward-weights {name}=FOLDER")
        raise T.UsageError(error) from None

SCORERS = {"jpeg": functools.partial(jpeg_reward, -1),  # compressible
           "incompressible": functools.partial(jpeg_reward, 1),
           "hpsv2": functools.partial(clip_reward, "hpsv2"),
           "clip": functools.partial(clip_reward, "clip"),
           "pickscore": functools.partial(clip_reward, "pickscore"),
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

# ==== 3. Measures: fn(images (B, 3, H, W) in [0, 1], prompts) -> (B,), as rewards are ===========
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
    nearest, names = (hue(mean)[:, None] - palette).cos().argmax(1).tolist(), list(T.COLOURS)
    right = torch.tensor([names[n] == p.split()[1] for n, p in zip(nearest, prompts, strict=True)])
    return (right.to(ink.device) & ink.any((1, 2))).float()

def match(images: Tensor) -> tuple[Tensor, Tensor]:
    """Shape and place whose outline best correlates with the ink of any colour; -1: no ink."""
    def centred(ink):
        ink = ink.flatten(1).float()
        return F.normalize(ink - ink.mean(1, keepdim=True))

    colour = next(iter(T.COLOURS))
    outlines = torch.cat([tiny_pixels(T.draw_caption(f"a {colour} {s}"))[1] for s in T.SHAPES])
    value, best = (centred(tiny_pixels(images)[1]) @ centred(outlines).T.to(images.device)).max(1)
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

def saturation(images: Tensor, prompts: list[str]) -> Tensor:
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

METRICS = {  # fn(device, folder) -> measure, besides the rewards
    "colour": lambda device, folder=None: right_colour,
    "shape": lambda device, folder=None: right_shape,
    "clean": lambda device, folder=None: clean_background,
}
TINY_METRICS, REAL_METRICS = ["shapes", "colour", "shape", "clean"], ["hpsv2", "clip"]
DRIFT = {"saturation": saturation, "sharpness": sharpness}
FALL = 0.02  # relative; a metric that was not trained for and surely falls by more raises an alarm
ALARMS = {  # change relative to the base outside of which a reward may be gamed: least, most, why
    "saturation": (-0.25, 0.25, "preference models like strong colour and contrast"),
    "sharpness": (-0.25, 0.25, "texture, grids and noise raise it; blur lowers it"),
    "diversity": (-0.25, math.inf, "one image per prompt is the cheapest way to a high reward"),
    "spread": (-0.25, math.inf, "the same, seen in where shapes are"),
}

def load_metric(name: str, device, folders: dict):
    known = T.reward_makers() | METRICS
    T.require(":" in name or name in known, f"--metrics {name}: allowed are {', '.join(known)} or "
              f"MODULE:FUNCTION{T.nearest(name, known)}")
    return (known[name](device, folders.get(name)) if name in known else
            T.load_function("--metrics", name))

# ==== 4. score: paired comparison of runs with their base =======================================
RESAMPLES, FEW = 2000, 4

def bootstrap(diff: Tensor) -> tuple[float, float]:
    """95 % interval of the mean of paired differences (P prompts, n images).

    In each resample prompts are drawn with replacement, then images within them. Up to 4 prompts
    with several images each are kept as they are: the interval then is about these prompts only.
    """
    (P, n), gen = diff.shape, torch.Generator().manual_seed(0)
    if P * n < 2:
        return math.nan, math.nan
    rows = torch.randint(P, (RESAMPLES, P, 1), generator=gen)
    if P <= FEW and n > 1:
        rows = torch.arange(P)[:, None]
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
    low, high, _ = ALARMS.get(name, (-math.inf, math.inf, ""))
    change = row["difference"] / row["base"] if row["base"] > 0 else 0.0
    if not low <= change <= high:
        return f"drift {change:+.0%}"
    falls = name not in {*ALARMS, *rewards} and row["high"] < 0 and change < -FALL
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
        with run.averaged():
            images = run.sample([prompt] * n, ("score", seed, prompt), list(range(n)))
        T.check_images(images, [prompt] * n)
        save_png(torch.cat(list(images), 2), path)
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

def score_prompts(args, configs: dict) -> list[str]:
    """Prompts to evaluate on, without repeats; says which of them were trained on."""
    source, prompts = args.prompts, T.CAPTIONS
    if source == "hpdv2" or not (source or all(map(is_tiny, configs.values()))):
        prompts = hpdv2_prompts()
    elif source:
        prompts = T.read_prompts(source)
    prompts = list(dict.fromkeys(prompts))
    if args.limit and args.limit < len(prompts):
        prompts = T.stream(args.seed, "limit").sample(prompts, args.limit)
    for folder, cfg in configs.items():
        check_prompts(cfg, prompts)
        if is_tiny(cfg):
            print(f"{folder}: the tiny world's captions are a closed set; only the noise is new")
            continue
        try:
            seen = set(prompts) & set(T.training_prompts(cfg))
        except T.UsageError as e:
            print(f"warning: {folder}: overlap with its training prompts is unknown ({e})")
        else:
            print(f"{folder}: trained on {len(seen)} of these {len(prompts)} prompts")
    return prompts

def score_command(args) -> None:
    """paired differences of runs from their base, with intervals, win rates and alarms"""
    configs = {Path(f): run_config(f) for f in args.runs}
    tiny = all(map(is_tiny, configs.values()))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rewards = {f: [T.parse_reward(r)[0] for r in cfg.reward] for f, cfg in configs.items()}
    names = args.metrics or sum(rewards.values(), []) + (TINY_METRICS if tiny else REAL_METRICS)
    pairs = [*args.reward_weights, *(p for c in configs.values() for p in c.reward_weights)]
    local = T.local_weights(pairs)
    metrics = {name: load_metric(name, device, local) for name in names} | DRIFT
    prompts, n = score_prompts(args, configs), args.n or (16 if tiny else 4)
    sets = ({"diversity": prompt_diversity} if n > 1 else {}) | ({"spread": spread} if tiny else {})
    rows, table, pictures, values = [], [], {}, {}
    for folder, cfg in configs.items():
        for weights in ("base", args.weights):
            where = image_folder(folder, cfg, weights, args.seed, n)
            paths = generate(where, folder, weights, prompts, args.seed, n)
            if where not in values:
                values[where] = measure(paths, n, metrics, sets, device)
                name = f"base of {cfg.model}" if weights == "base" else str(folder)
                pictures[name] = torch.stack([thumbnails(read_images(paths[p], n)[:4])
                                               for p in prompts[:8]])
        base = values[image_folder(folder, cfg, "base", args.seed, n)]
        for name, (b, t) in {k: (base[k], values[where][k]) for k in base}.items():
            row = {"run": str(folder), "metric": name} | compare_scores(b, t)
            rows.append(row | {"alarm": alarm(name, row, rewards[folder])})
            means = zip(prompts, *(v.mean(1).tolist() for v in (b, t, t - b)), strict=True)
            table += [(folder, name, *line) for line in means]
    setting = {"prompts": len(prompts), "images_per_prompt": n, "seed": args.seed,
               "weights": args.weights}
    out = Path(args.out or Path(args.runs[0]) / "score")
    write_scores(out, setting, rows, table, prompts, pictures)

def summary(setting: dict, rows: list[dict]) -> str:
    """Markdown: a table per run and the meaning of the alarms."""
    lines = ["# {prompts} prompts x {images_per_prompt} images, seed {seed}, {weights} weights, "
             "ODE sampler, same noise for base and run".format(**setting)]
    columns = ("metric", "base", "run", "difference", "95 % interval", "win rate", "alarm")
    for folder in dict.fromkeys(r["run"] for r in rows):
        lines += ["", f"## {folder}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for r in (r for r in rows if r["run"] == folder):
            wins = "" if r["metric"] in ALARMS else f"{r['win_rate']:.0%}"
            lines.append("| {metric} | {base:.3f} | {trained:.3f} | {difference:+.3f} | {low:+.3f} "
                         "to {high:+.3f} | {wins} | {alarm} |".format(**r, wins=wins))
    lines += ["", f"Alarms: a metric that was not the reward surely falls by over {FALL:.0%}, or",
              "", "| measure | leaves the range, relative to the base | because |", "|---|---|---|"]
    ranges = [f"| {k} | {lo:+.0%} to {hi:+.0%} | {why} |" for k, (lo, hi, why) in ALARMS.items()
              if k in {r["metric"] for r in rows}]
    return "\n".join(lines + ranges).replace("+inf%", "any") + "\n"

def write_scores(out: Path, setting: dict, rows, table, prompts, pictures) -> None:
    """summary.md, summary.json, prompts.csv and grid.png."""
    out.mkdir(parents=True, exist_ok=True)
    text = summary(setting, rows)
    results = [{k: None if v != v else v for k, v in r.items()} for r in rows]  # JSON has no nan
    (out / "summary.md").write_text(text)
    (out / "summary.json").write_text(json.dumps(setting | {"results": results}, indent=1) + "\n")
    with open(out / "prompts.csv", "w", newline="", encoding="utf-8") as f:
        columns = ("run", "metric", "prompt", "base", "trained", "difference")
        csv.writer(f).writerows([columns, *table])
    print("\n" + text)
    try:
        draw_blocks(out / "grid.png", "eval (ODE): same noise in all blocks", prompts[:8], pictures)
    except ImportError:
        print("no grid.png: matplotlib is not installed (pip install matplotlib)")
    print(f"written: {out}/ summary.md summary.json prompts.csv grid.png")

# ==== 5. Command line ===========================================================================
def draw_command(args) -> None:
    """curve.png, grid.png and tree.png of a run, as after training"""
    run = load_run(args.run, "last", rewards=True)
    run.iteration = run.iteration if args.iteration is None else args.iteration
    draw_run(run)

def sample_command(args) -> None:
    """images of a trained run, a row per prompt"""
    check_prompts(run_config(args.run), args.texts)
    run, n = load_run(args.run, args.weights), args.n or 8
    with run.averaged():
        images = run.sample([p for p in args.texts for _ in range(n)], ("sample", args.seed),
                            list(range(n)) * len(args.texts))
    zoom = max(1, 128 // images.shape[-1])
    images = images.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    path = Path(args.out or Path(args.run) / "sample.png")
    save_png(tiles(images.unflatten(0, (-1, n)), 4), path)
    print(path)

def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)

FLAGS = {
    "run": {"metavar": "RUN", "help": "run folder"},
    "runs": {"metavar": "RUN", "nargs": "+", "help": "run folders"},
    "texts": {"metavar": "PROMPT", "nargs": "+"},
    "--n": {"type": positive, "help": "images per prompt [sample: 8; score: 16, real models 4]"},
    "--seed": {"type": int, "default": 0, "help": "seed of the noise [0]"},
    "--weights": {"choices": ("best", "last", "base"), "default": "best", "help": "[best]"},
    "--out": {"help": "[sample: RUN/sample.png; score: folder RUN/score]"},
    "--prompts": {"help": "file, or hpdv2 [tiny: all captions, else hpdv2]"},
    "--metrics": {"nargs": "+", "metavar": "M", "help": f"shapes, {', '.join(SCORERS | METRICS)}, "
                  "MODULE:FUNCTION [the runs' rewards and metrics they were not trained for]"},
    "--reward-weights": {"nargs": "+", "metavar": "X", "default": (), "help": "NAME=FOLDER ..."},
    "--limit": {"type": positive, "help": "score a random sample of so many prompts"},
    "--iteration": {"type": int, "help": "whose tree is drawn [the last]"},
}

def flags(*names: str):
    """A function that adds these flags to a parser."""
    def add(parser) -> None:
        for name in names:
            parser.add_argument(name, **FLAGS[name])
    return add

COMMANDS = {  # name: (function, one that adds its arguments to a parser)
    "draw": (draw_command, flags("run", "--iteration")),
    "sample": (sample_command, flags("run", "texts", "--n", "--seed", "--weights", "--out")),
    "score": (score_command, flags("runs", "--prompts", "--metrics", "--reward-weights", "--n",
                                   "--seed", "--weights", "--limit", "--out")),
}

def main(argv: list[str] | None = None) -> int:
    parser = T.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, add_arguments) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=function.__doc__, allow_abbrev=False))
    try:
        args = parser.parse_args(argv)
        return COMMANDS[args.command][0](args) or 0
    except T.UsageError as e:
        print(f"evaluate: {e}", file=sys.stderr)
        return 2
    except (T.RewardError, T.NumericalError, OSError) as e:
        print(f"evaluate: {e}", file=sys.stderr)
        return 1

if __name__ == "__main__":
    sys.exit(importlib.import_module("evaluate").main())  # one module for treegrpo.py and us
