# Waits for the line on the volume, shows it, and fails if it is not what was written.

variable "words" {
  type    = string
  default = "written through CSI"
}

job "reader" {
  type = "batch"

  group "reader" {
    volume "notes" {
      type            = "csi"
      source          = "notes"
      read_only       = true
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
    }

    task "read" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args = ["-c", <<-EOT
          until [ -e /notes/line ]; do sleep 0.1; done
          cat /notes/line && grep -q "^$WORDS by alloc " /notes/line
        EOT
        ]
      }

      env {
        WORDS = var.words
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "notes"
        destination = "/notes"
        read_only   = true
      }
    }
  }
}
