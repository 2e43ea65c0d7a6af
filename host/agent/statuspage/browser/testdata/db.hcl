# Uses the volume and writes 20 MiB to it. The job report waits for the volume meanwhile.

variable "job" {
  type    = string
  default = "db"
}

job "db" {
  name = var.job
  id   = var.job

  group "main" {
    volume "data" {
      type            = "csi"
      source          = "db"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    task "main" {
      driver = "exec"

      config {
        command = "/bin/sh"
        args    = ["-c", "head -c 20M /dev/zero >/data/rows; exec sleep infinity"]
      }

      volume_mount {
        volume      = "data"
        destination = "/data"
      }
    }
  }
}
