# Tasks that see parts of one volume: the writing task has a directory of its alloc and a shared one, the reading task
# has only the shared one, read-only. For a mount that may write, missing directories are made with the mode of their
# parent. Symbolic links in the volume are followed if they stay in it.

job "sub-paths" {
  type = "batch"

  group "parts" {
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
          echo mine >/own/line && echo "$NOMAD_ALLOC_ID" >/shared/from.new && mv /shared/from.new /shared/from
        EOT
        ]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "notes"
        destination = "/own"
        sub_path    = "allocs/${NOMAD_ALLOC_ID}"
      }

      volume_mount {
        volume      = "notes"
        destination = "/shared"
        sub_path    = "shared"
      }
    }

    task "read" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args = ["-c", <<-EOT
          until grep "$NOMAD_ALLOC_ID" /shared/from; do sleep 0.1; done
          if touch /shared/written; then echo "it could be written to"; exit 1; fi
        EOT
        ]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "notes"
        destination = "/shared"
        sub_path    = "shared"
        read_only   = true
      }
    }
  }
}
