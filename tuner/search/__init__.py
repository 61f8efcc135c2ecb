"""The search over a space; the only folder that imports Optuna."""
