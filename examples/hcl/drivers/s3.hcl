# k8s-csi-s3: a bucket, or a prefix in one, for each volume. The mounter of the volume (s3fs, rclone or geesefs) is a
# FUSE server that the driver starts in its task.

variable "program" {
  type    = string
  default = "s3driver"
}

job "s3" {
  type = "system"

  group "plugin" {
    task "s3" {
      driver = "exec"

      config {
        command = var.program
        args    = ["--endpoint=${CSI_ENDPOINT}", "--nodeid=${node.unique.id}"]
      }

      env {
        HOME = "${NOMAD_SECRETS_DIR}" # the password file of s3fs
      }

      csi_plugin {
        id   = "s3"
        type = "monolith"
      }
    }
  }
}
