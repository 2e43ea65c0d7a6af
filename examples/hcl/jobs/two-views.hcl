# One volume under two names in one alloc: the task that writes has it read-write, the task that reads has it published
# read-only. The plugin stages it once. A volume_mount may be read-only too: a mount is read-only if either of the two
# says so.

job "two-views" {
  type = "batch"

  group "views" {
    volume "notes" {
      type            = "csi"
      source          = "notes"
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
    }

    volume "notes-to-read" {
      type            = "csi"
      source          = "notes"
      read_only       = true
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
    }

    task "write" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args    = ["-c", "echo \"$NOMAD_ALLOC_ID\" >/notes/view.new && mv /notes/view.new /notes/view"]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "notes"
        destination = "/notes"
      }
    }

    task "read" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args = ["-c", <<-EOT
          until grep "$NOMAD_ALLOC_ID" /notes/view; do sleep 0.1; done
          if touch /notes/written; then echo "it could be written to"; exit 1; fi
        EOT
        ]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "notes-to-read"
        destination = "/notes"
      }
    }
  }
}
