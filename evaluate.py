"""Looking at results."""

from __future__ import annotations

import dataclasses
import functools
import html
import io
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import treegrpo as T


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


def draw_run(run) -> None:
    pass


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
        for old, new in zip(OPEN_CLIP[::2], OPEN_CLIP[1::2]):
            key = key.replace(old, new)
        value = value.T if key in ("text_projection.weight", "visual_projection.weight") else value
        for n, part in zip("qkv", value.chunk(3)) if "in_proj_" in key else [("", value)]:
            out[key.replace("in_proj_", f"{n}_proj.")] = part
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
        clean = lambda prompt: html.unescape(html.unescape(fix_text(prompt))).lower()

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
    """LAION aesthetic predictor v2 (about 1 to 10): an MLP on CLIP ViT-L/14's L2-normalised features.

    Local copies: a folder with the MLP's file and, in it, `clip-vit-large-patch14`.
    """
    from huggingface_hub import hf_hub_download

    repo, file, *_ = HUB["aesthetic"]
    widths = (768, 1024, 128, 64, 16, 1)
    # keys of the published file: layers.0, 2, 4, 6, 7 (dropout between, no activation)
    mlp = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])))
    state = torch.load(folder / file if folder else hf_hub_download(repo, file), "cpu", weights_only=True)
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
        raise ImportError(f"{e}; this metric runs the image-reward package, which needs OpenAI's clip "
                          "and transformers 4, hence an environment of its own") from None
    from PIL import Image

    local = folder and dict(name=str(folder / "ImageReward.pt"), med_config=str(folder / "med_config.json"))
    model = ImageReward.load(**(local or {}), device=str(device))

    def score(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        pixels = (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        return torch.tensor([float(model.score(p, Image.fromarray(x))) for p, x in zip(prompts, pixels)])
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
