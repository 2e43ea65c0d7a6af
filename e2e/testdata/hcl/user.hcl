# A job that runs on a volume until it is stopped.

variables {
  id     = "user" # of the job; the group is always "user", the task "use"
  volume = "disk" # mounted at /disk
  mode   = "single-node-writer"
  does   = "echo here >>/disk/line" # shell commands before the endless loop
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
