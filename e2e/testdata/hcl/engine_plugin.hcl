# A CSI driver from an image: the job NAME with plugin NAME, by driver DRIVER.

variable "d" {
  type        = string
  description = "directory of the test's machine"
}

job "NAME" {
  type = "system"

  group "plugin" {
    task "NAME" {
      driver = "DRIVER"

      config {
        image        = "NAME:latest"
        entrypoint   = ["/bin/NAME"]
        args         = [ARGS]
        network_mode = "none"
        RIGHTS
        volumes      = ["${var.d}/data:${var.d}/data"]
      }

      csi_plugin {
        id   = "NAME"
        type = "monolith"

        heartbeat {
          interval = "1s"
          timeout  = "30s"
        }
      }

      restart {
        attempts = 20
        interval = "1h"
        delay    = "100ms"
        mode     = "fail"
      }
    }
  }
}
