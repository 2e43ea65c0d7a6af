variable "image" { default = "img" }
variable "names" {
  type    = list(string)
  default = ["a", "b"]
}
locals {
  tag   = "v${var.major}"
  both  = "${var.image}:${local.tag}"
  ports = { http = 80, https = 443 }
}
variable "major" {
  type    = number
  default = 2
  validation {
    condition     = var.major > 1
    error_message = "at least 2"
  }
}
job "refs" {
  datacenters = ["${node.datacenter}", "dc-${var.major}"]
  meta = {
    "key.with.dots" = upper("x")
  }
  group "g" {
    count = length(var.names)
    network {
      dynamic "port" {
        for_each = local.ports
        labels   = [port.key]
        content {
          static = port.value
        }
      }
    }
    task "t" {
      driver = "docker"
      env {
        "dotted.name" = "${meta.rack}"
        MIXED = "${var.image}-${NOMAD_ALLOC_ID}-${local.tag}"
      }
      config {
        image    = local.both
        args     = [for n in var.names : "--name=${n}-${NOMAD_ALLOC_INDEX}"]
        bare     = attr.cpu.arch
        spaced   = "${ node.unique.id }"
        indexed  = "${env["HOME"]}"
        quoted   = "$${NOMAD_PORT_http}"
        unknown  = "${token}"
        upper    = "${NFS_ADDRESS}:/srv"
        joined   = join(",", ["x", "${node.unique.name}"])
        cond     = var.major == 2 ? "two" : "other"
        tried    = try(local.ports.ftp, 21)
        encoded  = jsonencode({ a = [1, 2.5, true, null], b = "${CSI_ENDPOINT}" })
        motd     = file("motd.txt")
        percent  = "100%%{x} and 50%"
        for_text = "%{ for n in var.names ~}${n} %{ endfor ~}"
        b64      = base64decode(base64encode("hi"))
        found    = regex("[0-9]+", "abc42")
        uuid     = uuidv5("dns", "example.com")
        uuids    = uuidv5("886313e1-3b8a-5372-9b90-0c9aee199e5d", "x")
        number   = 12345678901234567890
        labels {
          app = "x"
        }
      }
      template {
        data        = <<-EOH
          {{ range service "db" }}server {{ .Address }}:{{ .Port }}{{ end }}
          {{- with secret "kv/x" -}} {{ .Data.key | toJSON }} {{- end }}
          { { { ( [ "unbalanced
          addr=${NOMAD_ADDR_http} image=${local.both}
        EOH
        destination = "${NOMAD_SECRETS_DIR}/out"
      }
    }
  }
}
