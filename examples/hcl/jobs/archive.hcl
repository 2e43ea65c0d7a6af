# Uses a volume that was made with mount options, and prints its mount.

job "archive" {
  type = "batch"

  group "archive" {
    volume "archive" {
      type            = "csi"
      source          = "archive"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    task "store" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args    = ["-c", "date >>/archive/log && grep ' /archive ext4 .*noexec' /proc/self/mounts"]
      }

      restart {
        attempts = 0
        mode     = "fail"
      }

      volume_mount {
        volume      = "archive"
        destination = "/archive"
      }
    }
  }
}
