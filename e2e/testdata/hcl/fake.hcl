# A plugin that does what a script says and keeps a journal: package csifake as a process.

variable "d" {
  description = "directory of the test's machine"
}

variable "csifake" {}

variable "args" {
  type        = list(string)
  default     = []
  description = "further arguments; of a flag that is given twice, this one counts"
}

variables {
  count         = 1
  version       = "1.0.0"
  ids           = "" # form of the ids of volumes
  caps          = "" # more capabilities, each with a comma before it
  health        = "30s"
  interval      = "1s"
  timeout       = "30s"
  restart_after = null
  list_volumes  = true
  attempts      = 3
}

job "fake" {
  group "plugin" {
    count = var.count

    task "fake" {
      driver = "exec"

      config {
        command = var.csifake
        args = concat([
          "--journal=${var.d}/journal", "--script=${var.d}/script", "--state=${var.d}/backend", "--data=${var.d}/data", "--mounts",
          "--caps=CREATE_DELETE_VOLUME,PUBLISH_UNPUBLISH_VOLUME,STAGE_UNSTAGE_VOLUME${var.caps}", "--version=${var.version}", "--instance=${NOMAD_ALLOC_ID}",
          "--ids=${var.ids}",
        ], var.args)
      }

      csi_plugin {
        id             = "fake"
        type           = "monolith"
        health_timeout = var.health
        list_volumes   = var.list_volumes

        heartbeat {
          interval      = var.interval
          timeout       = var.timeout
          restart_after = var.restart_after
        }
      }

      restart {
        attempts = var.attempts
        interval = "1h"
        delay    = "100ms"
        mode     = "fail"
      }
    }
  }
}
