# democratic-csi with its driver local-hostpath: a directory below var.path for each volume. var.source is a checkout
# after npm install.

variable "source" {
  type    = string
  default = "/opt/democratic-csi"
}

variable "path" {
  type    = string
  default = "/var/lib/csi-local-hostpath"
}

job "local-hostpath" {
  type = "system"

  group "plugin" {
    task "local-hostpath" {
      driver = "exec"

      config {
        command = "node"
        args = [
          "--expose-gc",
          "${var.source}/bin/democratic-csi",
          "--csi-version=1.5.0",
          "--csi-name=org.democratic-csi.local-hostpath",
          "--driver-config-file=${NOMAD_TASK_DIR}/driver.yaml",
          "--server-socket=${CSI_ENDPOINT}",
          "--log-level=info",
        ]
      }

      env {
        CSI_NODE_ID = "${node.unique.id}"
      }

      template {
        destination = "${NOMAD_TASK_DIR}/driver.yaml"
        data        = <<EOH
driver: local-hostpath
local-hostpath:
  shareBasePath: ${var.path}
  controllerBasePath: ${var.path}
  dirPermissionsMode: "0777"
  dirPermissionsUser: 0
  dirPermissionsGroup: 0
  snapshots:
    default_driver: filecopy
EOH
      }

      csi_plugin {
        id             = "local-hostpath"
        type           = "monolith"
        health_timeout = "2m"
      }
    }
  }
}
