"""Export of trained models: a directory with weights, a program, its inputs and outputs, and a model card.

``inputs``: raw samples, and the scaling that is part of the program. ``package``: the directory and its files.
``programs``: the network as a torch and ONNX program. ``model_card``: the card. ``source``: a run's model with its
facts. ``loading``: loading and using an exported directory.
"""
