"""The assumptions of the GPU plan, each number with its reason. None of them was measured by us."""

from __future__ import annotations

MFU = 0.35
BANDWIDTH = 0.75
LINK = 0.7
OVERLAP = 0.8
LATENCY = 20e-6  # seconds
EAGER_LAYER = 0.5e-3  # seconds
ENGINE_STEP = 2e-3  # seconds
GRAPH_KERNEL = 1.75e-6  # seconds
DECODE_KERNELS = (27, 70)  # of each layer, and beside the layers; benchmarks/count_8b.py counts them
ENGINE_SEQUENCES = 256
DISK = 2e9  # bytes a second
ADAMW_BYTES = 42
RESERVE = 0.1
MEAN_SHARE = 0.25
MEAN_PROMPT = 150  # tokens

ASSUMPTIONS = (
    f"Matrix products reach {MFU:.0%} of the data sheet's dense bfloat16 rate. The Llama 3 report has 38 to 43 % on "
    "thousands of H100 (arXiv 2407.21783, table 4); ours are launched one by one, so a little less.",
    f"Memory is read at {BANDWIDTH:.0%} of its bandwidth, links carry {LINK:.0%} of theirs: what large copies and "
    "collectives commonly reach.",
    f"A response has {MEAN_SHARE:.0%} of rollout.max_tokens on average (--mean-tokens says another number), lengths "
    f"spread like an exponential's, one reaches the limit; a prompt has {MEAN_PROMPT} tokens. What a policy writes is "
    "the least certain number here, and time is nearly proportional to it.",
    f"PyTorch launches a layer's kernels from Python in {EAGER_LAYER * 1e3:g} ms (about fifty of them at 10 µs), which "
    "a forward cannot beat, nor the two products of a backward each.",
    f"A step of the local engine runs {DECODE_KERNELS[0]} kernels a layer and {DECODE_KERNELS[1]} beside them, counted "
    f"by benchmarks/count_8b.py, at {GRAPH_KERNEL * 1e6:g} µs each inside CUDA graphs, on top of reading weights and "
    "keys. It admits responses to the free memory by their tokens and reads no padding (if the kernel for pages is "
    "missing, responses take slots of the longest's length, and far fewer fit). It gathers whole weights on every GPU, "
    "in the type of the compute, so that processes may draw at their own pace. The export of the model, vLLM's "
    "included, puts together one matrix after the other; the first process's host holds the result.",
    f"vLLM takes {ENGINE_STEP * 1e3:g} ms a step beside the GPU's work (CUDA graphs, scheduler), reads no padding, has "
    f"at most {ENGINE_SEQUENCES} responses under way, sleeps outside drawing, and splits the weights over 2, 4 or 8 "
    f"GPUs where one is too small. New weights reach it through files, at {DISK / 1e9:g} GB/s.",
    f"AdamW, clipping and rounding to bfloat16 move {ADAMW_BYTES} bytes for each trained number and update: norm 4, "
    "clipping 8, moments and weights 28, the rounded weight 2. Offloaded moments and masters cross PCIe there and "
    "back.",
    f"Of the collectives' time that computing could hide, {OVERLAP:.0%} is hidden: the first gather and the last "
    f"scatter have nothing beside them. Each takes {LATENCY * 1e6:g} µs times log2 of the processes besides.",
    "Groups are dealt to processes whole; a phase takes as long as it takes the process with the most groups, all "
    "groups being equally long. Uneven lengths come on top.",
    f"A tenth of the memory ({RESERVE:.0%}) stays free for CUDA's context and the gaps between allocations.",
    "Left out: evaluation, checkpoints, rewards and environments (they run while others are drawn), padding inside "
    "attention, and the core's sums over processes (kilobytes). What environments write counts as if it were drawn.",
)
