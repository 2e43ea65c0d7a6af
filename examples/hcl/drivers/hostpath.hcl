# csi-driver-host-path (kubernetes-csi): volumes are directories, or images on loop devices, below var.state.

variable "program" {
  type    = string
  default = "hostpathplugin"
}

variable "state" {
  type        = string
  default     = "/var/lib/hostpath"
  description = "where the driver keeps its volumes, on the host"
}

job "hostpath" {
  type = "system"

  group "plugin" {
    task "hostpath" {
      driver = "exec"

      config {
        command = var.program
        args = [
          "--drivername=hostpath.csi.k8s.io",
          "--endpoint=${CSI_ENDPOINT}",
          "--nodeid=${node.unique.id}",
          "--statedir=${var.state}",
          "--enable-controller-modify-volume",
          "--accepted-mutable-parameter-names=speed",
        ]
      }

      csi_plugin {
        id   = "hostpath"
        type = "monolith"

        # It reads its state when it starts, so two of them would disagree.
        roll = "stop_first"

        # In a cluster, each node has its own volumes.
        controller_scope = "node"
      }
    }
  }
}
