"""The flow `soup-train` as a script: the entry of a deployment of your own, and a program to run.

    python flows/soup_train.py MODEL DATASET                           # runs it here, on every visible GPU
    prefect deploy flows/soup_train.py:soup_train -n mine -p gpu       # deploys it

It is the package's own flow. Copy the file to give yours another name, or hooks: `package_flow.with_options(name=
"nightly", on_failure=[page_me])`.
"""

import sys

from soup_flows.flows import soup_train as package_flow

soup_train = package_flow.with_options()

if __name__ == "__main__":
    soup_train(model=sys.argv[1], dataset=sys.argv[2])
