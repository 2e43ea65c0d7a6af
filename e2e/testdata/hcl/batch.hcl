# A job that writes to the volume "disk", and ends when the file FINISH is there.

job "batch" {
  type = "batch"

  group "g" {
    volume "disk" {
      type            = "csi"
      source          = "disk"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    task "t" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args    = ["-c", "echo here >>/disk/line; until [ -e FINISH ]; do sleep 0.05; done; grep -q here /disk/line"]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "disk"
        destination = "/disk"
      }
    }
  }
}
