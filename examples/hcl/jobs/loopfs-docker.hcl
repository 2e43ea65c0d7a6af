# A CSI driver from an image: any published Nomad job of a driver looks like this. driver = "podman" runs it with
# Podman.

variable "data" {
  type        = string
  default     = "/var/lib/loopfs"
  description = "where loopfs keeps its images, on the host"
}

job "loopfs-docker" {
  type = "system"

  group "plugin" {
    task "loopfs" {
      driver = "docker"

      config {
        image        = "loopfs:latest"
        args         = ["--endpoint=${CSI_ENDPOINT}", "--data=/data", "--node-id=${node.unique.id}"]
        privileged   = true
        network_mode = "none"

        mount {
          type   = "bind"
          source = var.data
          target = "/data"
        }
      }

      csi_plugin {
        id        = "loopfs"
        type      = "monolith"
        mount_dir = "/csi"

        # In a cluster, each node has its own volumes.
        controller_scope = "node"
      }

      resources {
        cpu    = 100
        memory = 128
      }
    }
  }
}
