jobb "x" {}
group "g" {}
type = "csi"
