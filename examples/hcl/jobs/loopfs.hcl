# A plugin: loopfs serves controller and node from one process. Volumes are images (or, without root, directories)
# below var.data.

variable "data" {
  type        = string
  default     = "/var/lib/loopfs"
  description = "where loopfs keeps its images, on the host"
}

job "loopfs" {
  type = "system"

  group "plugin" {
    task "loopfs" {
      driver = "exec"

      config {
        command = "loopfs"
        args    = ["--endpoint=${CSI_ENDPOINT}", "--data=${var.data}", "--node-id=${node.unique.id}"]
      }

      csi_plugin {
        id   = "loopfs"
        type = "monolith"

        # In a cluster, each node has its own volumes.
        controller_scope = "node"

        # Nomad has no such block: how often the plugin is probed, and how many misses make it unhealthy.
        heartbeat {
          interval = "2s"
          timeout  = "1s"
          failures = 3
        }
      }

      restart {
        attempts = 10
        interval = "1m"
        delay    = "500ms"
        mode     = "delay"
      }
    }
  }
}
