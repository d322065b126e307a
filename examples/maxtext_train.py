"""MaxText's own training, with its checkpoints in unickpt: maxtext_train.py base.yml NAME=VALUE ...

Any configuration of MaxText. A run that Orbax saved goes on; docs/integrations/maxtext.md says
more.
"""

from absl import app
from maxtext.trainers.pre_train.train import main

from unickpt.integrations.maxtext import install

if __name__ == "__main__":
    install()
    app.run(main)
