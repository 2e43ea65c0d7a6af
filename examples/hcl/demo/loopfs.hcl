# The plugin: loopfs serves controller and node from one process.

variable "loopfs" {
  type        = string
  description = "the program"
}

variable "data" {
  type        = string
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
