"""The commands of ``compiled-llm tune``: a file each."""

COMMANDS = {
    "buckets": "bucket sizes that suit the work of earlier runs",
    "speculation": "the method of drafting, and how many drafts, that suit the work of earlier runs",
    "quantization": "which kinds of quantised weights are never slower on this CPU",
    "attention": "tiles of the attention kernels that are fast on this GPU",
    "linear": "products and tiles of linear layers that are fast on this GPU",
}
