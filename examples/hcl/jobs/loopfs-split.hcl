# loopfs as two processes over one data directory: a controller that makes volumes and a node part that mounts them.
# Both say the same plugin id; their types tell them apart.

locals {
  data   = "/var/lib/loopfs"
  common = ["--endpoint=${CSI_ENDPOINT}", "--data=${local.data}", "--attach"]
}

job "loopfs-split" {
  group "controller" {
    task "controller" {
      driver = "exec"

      config {
        command = "loopfs"
        args    = concat(local.common, ["--mode=controller", "--capacity=2GiB"])
      }

      csi_plugin {
        id             = "loopfs-split"
        type           = "controller"
        health_timeout = "10s"
      }
    }
  }

  group "node" {
    task "node" {
      driver = "exec"

      config {
        command = "loopfs"
        args    = concat(local.common, ["--mode=node", "--node-id=${node.unique.id}"])
      }

      csi_plugin {
        id             = "loopfs-split"
        type           = "node"
        health_timeout = "10s"
      }
    }
  }
}
