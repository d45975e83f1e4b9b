"""What the words of the report mean."""

GLOSSARY = {
    "soft, hard": "how routes are taken when measured: all experts by weight, or the one of "
    "largest weight. Every variant is measured both ways, whatever it was trained with.",
    "projected cost": "mean of weight times cost, with the paper's costs: full 1, linear 0.15, "
    "local 0.30. Hard cost: the same for hard routes.",
    "attention FLOPs": "counted for what was executed, as a share of full attention in every "
    "layer: scores and values of each token's own route, and the state of linear attention, which "
    "every token updates. At 64 tokens and head width 32 linear attention costs as much as full.",
    "routing entropy": "mean over tokens of the entropy of the weights; 100% is equal weights.",
    "adaptivity": "what a token tells about its route, in nats; 0 means constant routing.",
    "collapsed layers": "expert: more than 95% of tokens to one expert. Prior: mean KL or "
    "adaptivity below 0.01 nats. Both of the tokens that enter, where others pass a block by.",
    "regret": "loss with the chosen routes minus loss with each token's best forced expert, one "
    "layer at a time. Below 0, mixing beats any one expert.",
    "ECE": "expected calibration error, 15 bins: of the next character, and of the top expert "
    "being the best one.",
    "interval": "after \u00b1: half of the 95% interval of the mean over seeds (Student's t). "
    "Differences are taken seed by seed. One seed has none.",
    "verdict": "reproduced: the paper's sign, 0 not in our interval, and the paper's number in it "
    "or within a factor of 2 of our mean; a larger gain counts, too. Opposite: clearly the other "
    "sign.",
}
