"""Discovery: upstreams that come and go by a file, by DNS answers, or with Kubernetes pods.

Reading order: source, file, dns, pods, kubernetes, pod_api, tasks.
"""
