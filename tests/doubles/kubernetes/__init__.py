"""A double of the Kubernetes API with a scripted KubeRay operator: `python -m doubles.kubernetes`.

It is a double: it shows that a client speaks the API and survives its faults, not what a cluster does.
Objects of KubeRay's kinds are pruned, defaulted and checked by KubeRay's own CRD schemas (`ray_schema.json`).
There is no scheduler, no network policy and no image: a pod is a record that a script moves on, or, on
demand, real processes of this machine (see `kubelet`).
"""
