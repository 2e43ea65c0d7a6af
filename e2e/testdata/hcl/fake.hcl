# A plugin that does what a script says and keeps a journal: package csifake as a process.

variable "d" {
  type        = string
  description = "directory of the test's machine"
}

variable "csifake" {
  type = string
}

variable "count" {
  type    = number
  default = 1
}

variable "version" {
  type    = string
  default = "1.0.0"
}

variable "ids" {
  type        = string
  default     = ""
  description = "form of the ids of volumes"
}

variable "caps" {
  type        = string
  default     = ""
  description = "more capabilities, each after a comma"
}

variable "health" {
  type    = string
  default = "30s"
}

variable "attempts" {
  type    = number
  default = 3
}

job "fake" {
  group "plugin" {
    count = var.count

    task "fake" {
      driver = "exec"

      config {
        command = var.csifake
        args = [
          "--journal=${var.d}/journal", "--script=${var.d}/script", "--state=${var.d}/backend", "--data=${var.d}/data", "--mounts",
          "--caps=CREATE_DELETE_VOLUME,PUBLISH_UNPUBLISH_VOLUME,STAGE_UNSTAGE_VOLUME${var.caps}", "--version=${var.version}", "--instance=${NOMAD_ALLOC_ID}",
          "--ids=${var.ids}",
        ]
      }

      csi_plugin {
        id             = "fake"
        type           = "monolith"
        health_timeout = var.health

        heartbeat {
          interval = "1s"
          timeout  = "30s"
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
