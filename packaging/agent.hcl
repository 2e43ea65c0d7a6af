# Configuration of holdfast agent. Each key is a flag of that command; flags have precedence.
# Values after # are the defaults. A change needs a restart of the agent, which leaves tasks and mounts as they are:
#   systemctl restart holdfast

# API of the docker driver's engine
# docker_engine = "unix:///var/run/docker.sock"

# task driver for all tasks: exec, raw_exec, or default (set by the job)
# driver = "default"

# program that fences the node named by its argument, and exits with 0 once that node cannot write any more
# fence_command = ""

# serve a status page for browsers on this address, as in 127.0.0.1:9751
# http = ""

# log level: trace, debug, info, warn or error (default warn; agent: info)
# log_level = ""

# serve Prometheus metrics and /healthz on this address, as in 127.0.0.1:9750
# metrics = ""

# name of this node (default: the host name)
# node = ""

# API of the podman driver's engine
# podman_engine = "unix:///run/podman/podman.sock"

# directory for sockets (default /run/holdfast/DIGEST, with a digest of the state directory's path)
# run_dir = ""

# shim binary (default holdfast-shim beside this program or in PATH)
# shim = ""

# how long the previous shim stays on standby after a swap
# shim_bake = "10s"

# how long calls wait for a shim to start
# shim_max_hold = "30s"

# how long a swap may hold calls before it is rolled back
# shim_swap_budget = "500ms"

# state directory (env HOLDFAST_STATE_DIR; default /var/lib/holdfast; run: a temporary directory)
# state_dir = ""

# stop all tasks when the agent ends
# stop_tasks = false

# time limit for --stop-tasks
# stop_timeout = "2m0s"

# plugin that creates the volumes of docker run -v NAME:/DIR
# volume_default_plugin = ""

# size of the volumes of docker run -v, as in 1G
# volume_default_size = ""

# serve volumes to Docker or Podman on this socket, as in /run/docker/plugins/holdfast.sock
volume_plugin = "/run/docker/plugins/holdfast.sock"

# Podman finds volume_plugin by these lines in /etc/containers/containers.conf. See docs/containers.md
#   [engine]
#   volume_plugin_timeout = 120
#   [engine.volume_plugins]
#   holdfast = "/run/docker/plugins/holdfast.sock"

# Nodes with such a block share volumes through etcd. See docs/cluster.md
# cluster {
#   id        = "production"
#   expect    = 3
#   endpoints = ["https://10.0.0.1:2379", "https://10.0.0.2:2379", "https://10.0.0.3:2379"]
#   tls {
#     ca_file   = "/etc/holdfast/etcd-ca.pem"
#     cert_file = "/etc/holdfast/etcd.pem"
#     key_file  = "/etc/holdfast/etcd-key.pem"
#   }
# }
