# Follows the file that the job writer writes: a second user of the same volume, read-only.

job "reader" {
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
        args    = ["-c", "tail -F /notes/log"]
      }

      volume_mount {
        volume      = "notes"
        destination = "/notes"
        read_only   = true
      }
    }
  }
}
