"""Accuracy of models on data: data sets, scores with intervals, and variants of a model run on a board."""
