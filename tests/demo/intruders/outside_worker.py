"""(ii) A worker started by hand outside the cluster, under the same id, as a second cluster would."""


def run(demo): ...
