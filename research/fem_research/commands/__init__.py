"""The commands of the experiments, one module each, which the entry-point group `fem.commands` adds to `fem`."""

HELP = {
    "demo": "What FEM does, in minutes: two language models on real text, and a look inside.",
    "finetune": "Train a small GPT-2 or Llama further, as it is and turned into FEM.",
    "ablate": "What each part of FEM adds to a language model, with controls.",
    "argmax": "Can one read fetch every channel's maximum? (Appendix P)",
    "regimes": "Tasks that separate reading one mixture from reading per channel.",
    "natural": "Pool sets and series that have natural labels.",
    "mad": "Six synthetic tasks that probe a sequence mixer. (Table 1)",
    "forecast": "Forecast time series at equal parameters. (Table 4)",
    "vision": "Classify images at equal parameters. (Table 3)",
    "bench": "Time and memory beside attention of equal weights. (Tables 5 and 7)",
    "plan": "What a training costs before it runs: memory, messages, predicted time.",
    "report": "Turn finished runs into pages beside the paper's tables.",
}
# The same command goes on where it was stopped.
RESUMABLE = ("ablate", "mad", "regimes", "natural", "forecast", "vision")
