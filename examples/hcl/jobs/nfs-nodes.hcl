# The node part of the NFS driver: one on every machine. Its mounts outlive the task because network_mode is "host".

job "nfs-nodes" {
  datacenters = ["*"]
  type        = "system"
  node_pool   = "all"

  constraint {
    attribute = "${attr.kernel.name}"
    value     = "linux"
  }

  group "nodes" {
    restart {
      attempts = 5
      delay    = "15s"
      interval = "10m"
      mode     = "delay"
    }

    task "plugin" {
      driver = "docker"

      config {
        image        = "registry.k8s.io/sig-storage/nfsplugin:v4.11.0"
        privileged   = true
        network_mode = "host"
        args         = ["--endpoint=${CSI_ENDPOINT}", "--nodeid=${attr.unique.hostname}", "--drivername=nfs.csi.k8s.io"]
      }

      csi_plugin {
        id        = "nfs"
        type      = "node"
        mount_dir = "/csi"
      }

      kill_signal  = "SIGTERM"
      kill_timeout = "20s"

      resources {
        cpu    = 100
        memory = 64
      }
    }
  }
}
