"""The peer of `train_step.py`: transformers' Qwen3-MoE in torch, timed on request.

Run by the benchmark in the peer's own environment, never by hand: reads one JSON shape from the
command line, then one JSON request a line from standard input, and answers each with one line.
"""

import json
import os
import sys
import time

import torch
import transformers

EXPERTS = "grouped_mm"
"""The fastest it has: `batched_mm` copies one expert's matrices per assignment, 6 GB here."""
LEARNING_RATE = 1e-4
NUM_BATCHES = 8


def build(shape: dict) -> torch.nn.Module:
    """The model of a shape, in float32, without auxiliary losses or dropped tokens."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["width"],
        intermediate_size=shape["expert_width"],
        moe_intermediate_size=shape["expert_width"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        num_experts=shape["num_experts"],
        num_experts_per_tok=shape["experts_per_token"],
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=shape["sequence_length"],
        output_router_logits=False,
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM._from_config(
        config, attn_implementation="sdpa", experts_implementation=EXPERTS
    )
    return model.float().train()


class Peer:
    """One model with its optimizer and a few random batches, taken in turn."""

    def __init__(self, shape: dict) -> None:
        self.model = build(shape)
        size = (shape["batch_sequences"], shape["sequence_length"])
        generator = torch.Generator().manual_seed(0)
        size = (NUM_BATCHES, *size)
        self.batches = torch.randint(0, shape["vocab_size"], size, generator=generator)
        self.steps = 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, fused=True)

    def step(self) -> dict[str, float]:
        """Seconds of both halves of a step, processor seconds of the step, and the loss."""
        start, processor = time.perf_counter(), time.process_time()
        tokens = self.batches[self.steps % NUM_BATCHES]
        self.steps += 1
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "gradients": middle - start,
            "update": time.perf_counter() - middle,
            "processor": time.process_time() - processor,
            "loss": loss.item(),
        }


def operators(peer: Peer) -> dict[str, int]:
    """How often one step calls each operator that multiplies matrices."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        peer.step()
    events = {event.key: event.count for event in profile.key_averages()}
    return {name: count for name, count in events.items() if "mm" in name.split("::")[-1]}


def matmul_flops_per_second(rounds: int) -> float:
    """Best rate of a float32 product of 1024 x 1024 matrices."""
    a = torch.ones(1024, 1024)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(seconds)


def main() -> None:
    """Build, describe, then time steps until standard input ends."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    peer = Peer(json.loads(sys.argv[1]))
    peer.step()
    answer = {
        "experts": EXPERTS,
        "operators": operators(peer),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "products" in request:
            found = matmul_flops_per_second(request["products"])
        else:
            found = [peer.step() for _ in range(request["steps"])]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
