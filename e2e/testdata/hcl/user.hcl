# A job that runs on a volume until it is stopped.

variables {
  id     = "user"
  volume = "disk"
  mode   = "single-node-writer"
  does   = "echo here >>/disk/line"
}

job "user" {
  id = var.id

  group "user" {
    volume "disk" {
      type            = "csi"
      source          = var.volume
      access_mode     = var.mode
      attachment_mode = "file-system"
    }

    task "use" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args    = ["-c", "trap 'exit 0' TERM; ${var.does}; while true; do sleep 0.1; done"]
      }

      volume_mount {
        volume      = "disk"
        destination = "/disk"
      }
    }
  }
}
