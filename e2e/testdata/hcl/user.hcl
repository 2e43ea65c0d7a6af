# A job that runs on the volume "disk" until it is stopped.

job "user" {
  group "user" {
    volume "disk" {
      type            = "csi"
      source          = "disk"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    task "use" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args    = ["-c", "trap 'exit 0' TERM; echo here >>/disk/line; while true; do sleep 0.1; done"]
      }

      volume_mount {
        volume      = "disk"
        destination = "/disk"
      }
    }
  }
}
