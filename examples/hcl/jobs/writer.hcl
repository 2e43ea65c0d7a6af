# Appends a line to a file on the volume "notes", every second.

job "writer" {
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
        args    = ["-c", "while true; do date >>/notes/log; sleep 1; done"]
      }

      volume_mount {
        volume      = "notes"
        destination = "/notes"
      }
    }
  }
}
