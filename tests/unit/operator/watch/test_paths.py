"""Names become URL paths, and some names come from pods."""

from __future__ import annotations

import pytest

from outbox_operator.cluster.kube import KubeError, Where


def test_a_place_is_a_path():
    assert Where("Pod", "shop", "orders-0").path() == "api/v1/namespaces/shop/pods/orders-0"
    assert Where("RoleBinding", "shop", "a:b.c").path("status").endswith("/namespaces/shop/rolebindings/a:b.c/status")
    assert Where("Pod", "").path() == "api/v1/pods"


@pytest.mark.parametrize(
    "name", ["..", "../../configmaps/secret", "a/b", "a?b", "a#b", "%2e%2e", "A", "-a", "a\n", "a" * 254]
)
def test_what_is_no_name_leads_nowhere(name):
    for place in (Where("Pod", "shop", name), Where("Pod", name, "orders-0")):
        with pytest.raises(KubeError, match="is no name of a Kubernetes object"):
            place.path()
