# Writes a line to the volume, and ends.

variable "words" {
  type    = string
  default = "written through CSI"
}

job "writer" {
  type = "batch"

  group "writer" {
    volume "notes" {
      type            = "csi"
      source          = "notes"
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
    }

    task "write" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args = ["-c", <<-EOT
          grep ' /notes ' /proc/self/mountinfo &&
            echo "$WORDS by alloc $NOMAD_ALLOC_ID" >/notes/line.new && mv /notes/line.new /notes/line
        EOT
        ]
      }

      env {
        WORDS = var.words
      }

      volume_mount {
        volume      = "notes"
        destination = "/notes"
      }
    }
  }
}
