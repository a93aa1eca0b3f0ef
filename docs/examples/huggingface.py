"""Give a Hugging Face model fused attention in two ways, and compare it with the model as it was.

    pip install transformers
    python docs/examples/huggingface.py

The model is a small Qwen 3 with random weights, so nothing is downloaded. With a model of yours, use from_pretrained.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import fusedattn
from fusedattn.integrations.transformers import register

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_config(n_layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=n_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        pad_token_id=0,
        eos_token_id=None,  # generate as many tokens as asked for
        attn_implementation="eager",
        initializer_range=0.2,  # large random weights, so that the generated tokens vary
    )


def left_padded_batch(lengths: list[int], seqlen: int) -> tuple[Tensor, Tensor]:
    """Random ids and the mask of real tokens, both ``(batch, seqlen)``; prompts for generation end together."""
    real = torch.arange(seqlen) >= seqlen - torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 1000, (len(lengths), seqlen)).masked_fill(~real, 0)
    return ids.to(DEVICE), real.long().to(DEVICE)


def training_step(model: nn.Module, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the gradients of all parameters as one vector."""
    # The model predicts a token from the one before it. Where that is padding, implementations differ: no loss there.
    has_loss = (real == 1) & (real.roll(1, dims=1) == 1)
    model.zero_grad()
    loss = model(ids, attention_mask=real, labels=ids.masked_fill(~has_loss, -100)).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest number."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(small_config(args.layers)).to(DEVICE).eval()
    ids, real = left_padded_batch([args.seqlen, args.seqlen // 2, args.seqlen // 8], args.seqlen)

    def results() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits of the real tokens, generated ids, loss and gradients."""
        with torch.no_grad():
            logits = model(ids, attention_mask=real).logits[real == 1]
        tokens = model.generate(ids, attention_mask=real, max_new_tokens=args.new, do_sample=False)
        return logits, tokens, *training_step(model, ids, real)

    expected = results()

    def compare(way: str) -> None:
        logits, tokens, loss, gradients = results()
        differences = {
            "logits": relative_difference(logits, expected[0]),
            "loss": relative_difference(loss, expected[2]),
            "gradients": relative_difference(gradients, expected[3]),
        }
        if max(differences.values()) > 1e-3 or not torch.equal(tokens, expected[1]):
            raise SystemExit(f"{way}: results differ from eager attention's: {differences}")
        print(f"{way}: {args.new} generated tokens of {len(ids)} prompts are equal; largest relative differences:")
        print("  ", ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items()))

    # 1. fuse(model) also moves RoPE and the norm of q and k into the attention.
    fusedattn.fuse(model)
    for replacement in fusedattn.fusion_report(model):
        print(replacement)
    compare("fuse(model)")
    fusedattn.unfuse(model)

    # 2. The name of an implementation, as transformers has it for its own.
    register()
    model.set_attn_implementation("fusedattn")
    compare('attn_implementation="fusedattn"')

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before, _ = training_step(model, ids, real)
    optimizer.step()
    after, _ = training_step(model, ids, real)
    print(f"one training step: loss {before.item():.4f} before, {after.item():.4f} after")


if __name__ == "__main__":
    main()
