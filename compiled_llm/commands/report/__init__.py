"""The commands of ``compiled-llm report``: a file each."""

COMMANDS = {
    "run": "serve rows and write how near the machine's limits that was",
    "weights": "what quantised weights cost in quality, and save in memory and time",
    "kv-cache": "what a quantised KV cache costs in quality, and saves in memory",
    "perplexity": "perplexity of a text, and bits per byte",
    "lm-eval": "tasks of lm-eval (EleutherAI's lm-evaluation-harness)",
    "gpu-step": "what a GPU would run in a step, shown without one",
}
