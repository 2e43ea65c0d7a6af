# moosefs-csi: a directory of a MooseFS for each volume. Its controller and its node are two modes of one program, which
# serve FUSE mounts (mfsmount).

variable "program" {
  type    = string
  default = "moosefs-csi-plugin"
}

variable "master" {
  type        = string
  default     = "mfsmaster.example.net"
  description = "the MooseFS master; not 127.0.0.1, which its chunk servers refuse"
}

job "moosefs" {
  type = "system"

  group "controller" {
    task "controller" {
      driver = "exec"

      config {
        command = var.program
        args = [
          "--mode=controller",
          "--csi-endpoint=${CSI_ENDPOINT}",
          "--master-host=${var.master}",
          "--root-dir=/",
          "--plugin-data-dir=/csi-volumes",
          "--mfs-logging=false",
        ]
      }

      csi_plugin {
        id   = "moosefs"
        type = "controller"
      }
    }
  }

  group "node" {
    task "node" {
      driver = "exec"

      config {
        command = var.program
        args = [
          "--mode=node",
          "--csi-endpoint=${CSI_ENDPOINT}",
          "--master-host=${var.master}",
          "--node-id=${node.unique.id}",
          "--root-dir=/",
          "--plugin-data-dir=/csi-volumes",
          "--mfs-logging=false",
        ]
      }

      csi_plugin {
        id   = "moosefs"
        type = "node"
      }
    }
  }
}
