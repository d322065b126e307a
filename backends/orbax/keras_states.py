"""How the state of a Keras model is stored, by `unickpt.integrations.keras` and by Keras itself.

Keras' callback OrbaxCheckpoint writes what `Model.get_state_tree` returns, which has the variables
that are trained apart from the others. Here they are one group, so that it does not matter at a
load which layers are frozen; which ones were trained is noted in the metadata.
"""

CONFIG = "keras"
"""The configuration of the model, in the metadata."""
VARIABLES = "keras_variables"
"""The paths of the model's variables, by Keras' two groups and in its order, in the metadata."""
MODEL = "model"
"""The group with all variables of the model."""
TRAINED, OTHERS = "trainable_variables", "non_trainable_variables"
"""The two groups that Keras makes of it."""
FURTHER = {"optimizer": "optimizer_variables", "metrics": "metrics_variables"}
"""Keras' names of the other groups."""
POSITION = "fit"
"""The group that says how far a `fit` has come, of which Keras knows nothing."""
