# The plugin: loopfs serves controller and node from one process.

variable "loopfs" {
  type        = string
  default     = "loopfs"
  description = "the program: a path, or a name that is found in the PATH of a task (/usr/local/bin and the like)"
}

variable "data" {
  type        = string
  default     = "/var/lib/loopfs"
  description = "where loopfs keeps its volumes, on the host"
}

variable "backend" {
  type        = string
  default     = "auto"
  description = "loop (devices, needs root), dir, or auto"
}

job "loopfs" {
  type = "system"

  group "plugin" {
    task "loopfs" {
      driver = "exec"

      config {
        command = var.loopfs
        args    = ["--data=${var.data}", "--backend=${var.backend}", "--node-id=${node.unique.name}"]
      }

      csi_plugin {
        id   = "loopfs"
        type = "monolith"

        # In a cluster, each node has its own volumes.
        controller_scope = "node"

        heartbeat {
          interval = "2s"
          timeout  = "1s"
        }
      }

      restart {
        attempts = 5
        interval = "1m"
        delay    = "500ms"
        mode     = "delay"
      }
    }
  }
}
