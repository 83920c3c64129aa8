"""Trained models handed over: a directory with weights, a program, what it takes and gives, and a model card.

``inputs``: raw samples, and the scaling that is part of the program. ``package``: the directory and its files.
``programs``: the network as torch's and ONNX's program. ``model_card``: the card. ``source``: a run's model with its
facts. ``loading``: the directory loaded and used.
"""
